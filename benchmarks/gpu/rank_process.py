"""One rank of the part `ranks`: `python -m benchmarks.gpu.rank_process ORDER`, started by
`lockstep.backends.torch`."""

import json
import sys

from benchmarks.gpu.ranks import work_as_rank
from lockstep.system.ranks import follow_launcher

if __name__ == "__main__":
    follow_launcher()  # the launcher is killed if the part takes too long
    work_as_rank(json.loads(sys.argv[1]))
