"""What the Trainer's own engine says of itself, for test_trainer.py: `python -m tests.measure.trainer_facts JOB`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

from explorer.measure.step import make_run
from explorer.setup import Setup


def facts(job: Mapping[str, Any]) -> dict[str, Any]:
    """The config that DeepSpeed got, its optimizer, and the elements and weight decay of each parameter group."""
    run = make_run(Setup.from_job(job), lambda message: None)
    sizes: list[tuple[int, float]] = []
    run.meter.begin_init = _noting(run, sizes, run.meter.begin_init)
    run.profile()
    engine = run.engine
    return {"config": _plain(engine.config), "optimizer": type(engine.basic_optimizer).__name__, "fused": bool(engine.basic_optimizer.defaults.get("fused")), "wrapper": type(engine.optimizer).__name__, "groups": sizes}


def _noting(run: Any, sizes: list[Any], plain: Callable[[], None]) -> Callable[[], None]:
    """Groups are read as `deepspeed.initialize` is handed them, before it flattens their tensors."""

    def begin() -> None:
        import deepspeed

        initialize = deepspeed.initialize

        def noted(*args: Any, **kwargs: Any) -> Any:
            optimizer, parameters = kwargs.get("optimizer"), kwargs.get("model_parameters")
            groups = optimizer.param_groups if optimizer is not None else [{"params": list(parameters), "weight_decay": None}]
            sizes.extend((sum(getattr(p, "ds_numel", p.numel()) for p in g["params"]), g["weight_decay"]) for g in groups)
            return initialize(*args, **kwargs)

        deepspeed.initialize = noted
        plain()

    return begin


def _plain(config: Any) -> Any:
    if isinstance(config, Mapping):
        return {k: _plain(v) for k, v in config.items()}
    return config if config is None or isinstance(config, bool | int | float | str) and config != float("inf") else repr(config)


if __name__ == "__main__":
    print(json.dumps(facts(json.loads(sys.argv[1]))))
