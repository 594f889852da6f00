"""A command of a part that ends in one of the ways in which a command can end."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def main(does: str, file: str) -> None:
    with Path(file).open("a") as counted:
        counted.write("begun\n")
    print('{"what": "begun"}', flush=True)
    if does == "raise":
        raise ValueError("the figure is not there")
    if does == "die":
        print('{"what": "cut o', end="", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    if does == "hang":
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        child = subprocess.Popen(["sleep", "1000"])
        print(f'{{"what": "child", "number": {child.pid}}}', flush=True)
        Path(f"{file}-hangs").touch()
        time.sleep(1000)


if __name__ == "__main__":
    main(*sys.argv[1:])
