"""Ask llm-analysis about every row that it speaks of, and keep what it says.

It asks for transformers below 5, so it has an environment of its own, into which it goes without what it does not need for this:

    python -m venv SOMEWHERE && SOMEWHERE/bin/pip install --no-deps llm-analysis==0.2.2 && SOMEWHERE/bin/pip install fire
    python -m benchmarks.accuracy.ask_llm_analysis SOMEWHERE/bin/python
"""

from __future__ import annotations

import argparse
import json

from benchmarks.accuracy.llm_analysis import SAID, ask
from benchmarks.accuracy.others import llm_analysis_questions


def main() -> None:
    """Every answer into the file."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("python", help="the interpreter of an environment with llm-analysis")
    said = ask(options.parse_args().python, llm_analysis_questions())
    SAID.write_text(json.dumps(said, indent=0) + "\n", encoding="utf-8")
    print(f"{len(said)} answers")


if __name__ == "__main__":
    main()
