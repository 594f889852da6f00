"""The files that the fuzzer of weights damages are whole to begin with."""

import subprocess
import sys


def test_the_fuzzer_reads_whole_files() -> None:
    # In a process of its own, since the fuzzer makes the networks smaller. Keras and TensorFlow
    # take seconds to be imported.
    code = (
        "from tests.weights.formats.fuzz_weights import SAMPLES, judge_samples\n"
        "for kind in SAMPLES:\n"
        "  if not kind.startswith(('keras', 'tensorflow-')): judge_samples(kind); print(kind)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, "timm" in done.stdout.split()) == (0, True), done.stderr[-2000:]
