"""The two ways a job can end without an answer, each with the exit code other programs rely on."""


class BadInput(ValueError):
    """What was asked cannot be: one sentence that names the field and the way out (exit code 2)."""

    exit_code = 2

    def __init__(self, field: str, sentence: str) -> None:
        self.field = field
        super().__init__(f"{field}: {sentence}" if field else sentence)


class CouldNotRun(RuntimeError):
    """What was asked is fine, but not here and now: no GPU, a missing extra, a time limit (exit code 5)."""

    exit_code = 5


def missing_extra(what: str, package: str) -> CouldNotRun:
    """The sentence for a package of the `[probe]` extra that is not installed."""
    return CouldNotRun(f"{what} needs {package}, which is not installed: pip install 'deepspeed-memory-explorer[probe]'")
