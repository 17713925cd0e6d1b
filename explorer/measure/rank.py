"""One rank of a job whose ranks all run, started by DeepSpeed's launcher: `python -m explorer.measure.rank FOLDER` (torch).

FOLDER has the job, and gets this rank's answer.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from explorer.measure.messages import described
from explorer.measure.processes import die_with_parent
from explorer.measure.ranks import JOB, PROGRESS, answer_file
from explorer.measure.step import make_run
from explorer.measure.world import Launched
from explorer.setup import Setup


def main() -> None:
    """Run this rank and leave its answer."""
    die_with_parent()
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    argument = json.loads((folder / JOB).read_text())
    asked = Setup.from_job(argument["job"])

    def emit(message: dict[str, Any]) -> None:
        if rank == asked.rank:
            os.write(1, f"\n{PROGRESS}{json.dumps(message)}\n".encode())  # whole, whatever the other ranks write

    try:
        run = make_run(asked.replace(rank=rank), emit, Launched(rank, asked.world_size, int(os.environ["LOCAL_RANK"])))
        run.meter.alone = bool(argument.get("locks"))
        answer = {"result": run.profile().to_record()}
    except BaseException as error:  # whatever it was, whoever asked hears of it
        answer = {"error": described(error)}
    part = folder / f"{rank}.part"
    part.write_text(json.dumps(answer))
    part.rename(answer_file(folder, rank))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
