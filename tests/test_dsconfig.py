"""The DeepSpeed part: what is read, filled, refused, and merely noted. Defaults are DeepSpeed 0.19.8's."""

from __future__ import annotations

import pytest

from explorer.dsconfig import Settings, resolve
from explorer.dsconfig.keys import ALIASES, OFFLOAD_OPTIMIZER, OFFLOAD_PARAM, ZERO
from explorer.errors import BadInput
from explorer.setup import Setup


def settings(deepspeed=None, /, **job) -> Settings:
    return resolve(Setup(**{"model": "gpt2", "micro_batch": 4, "deepspeed": deepspeed or {}, **job}))


def zero(**section):
    return {"zero_optimization": section}


# --- defaults and values


def test_an_empty_config_is_deepspeeds_defaults():
    s = settings()
    assert (s.stage, s.precision, s.gradient_accumulation_steps, s.overlap_comm) == (0, "fp32", 1, False)
    assert (s.reduce_bucket_size, s.prefetch_bucket_size, s.param_persistence_threshold) == (500_000_000, 50_000_000, 100_000)
    assert (s.sub_group_size, s.max_live_parameters, s.max_reuse_distance) == (10**9, 10**9, 10**9)
    assert s.offload_optimizer is None and s.offload_param is None
    assert s.optimizer.implementation == "FusedAdam"
    assert any("AdamW is assumed" in note for note in s.notes)


def test_every_key_and_default_is_deepspeeds_own():
    """Against the classes that DeepSpeed itself reads a config with."""
    config = pytest.importorskip("deepspeed.runtime.zero.config")
    offload = pytest.importorskip("deepspeed.runtime.zero.offload_config")
    for keys, theirs in ((ZERO, config.DeepSpeedZeroConfig), (OFFLOAD_OPTIMIZER, offload.DeepSpeedZeroOffloadOptimizerConfig), (OFFLOAD_PARAM, offload.DeepSpeedZeroOffloadParamConfig)):
        fields = {field.alias or name: field for name, field in theirs.model_fields.items()}
        assert set(keys) == set(fields)
        for name, key in keys.items():
            default = fields[name].get_default(call_default_factory=True)
            if key.kind in ("int", "bool", "float") and name not in ("overlap_comm", "pin_memory"):
                assert key.default == default, name
    assert set(ALIASES) == {name for name, field in config.DeepSpeedZeroConfig.model_fields.items() if field.alias and field.alias != name}


@pytest.mark.parametrize("written", [200_000_000, 2e8, "200000000", "200_000_000"])
def test_numbers_in_every_form_deepspeed_takes(written):
    assert settings(zero(stage=2, reduce_bucket_size=written)).reduce_bucket_size == 200_000_000


@pytest.mark.parametrize(("written", "read"), [(True, True), ("true", True), ("on", True), (1, True), (False, False), ("no", False), ("0", False)])
def test_truth_in_every_form_deepspeed_takes(written, read):
    assert settings(zero(stage=2, overlap_comm=written)).overlap_comm is read


def test_overlap_is_on_at_stage_3_only_unless_said():
    assert [settings(zero(stage=stage)).overlap_comm for stage in range(4)] == [False, False, False, True]
    assert settings(zero(stage=3, overlap_comm=False)).overlap_comm is False


@pytest.mark.parametrize("alias", ["prefetch_bucket_size", "stage3_prefetch_bucket_size"])
def test_stage_3_names_with_and_without_prefix(alias):
    assert settings(zero(stage=3, **{alias: 123})).prefetch_bucket_size == 123


@pytest.mark.parametrize(
    ("deepspeed", "precision", "model_bytes", "accum_bytes"),
    [
        ({}, "fp32", 4, 4),
        ({"fp16": {"enabled": True}}, "fp16", 2, 2),
        ({"bf16": {"enabled": "true"}}, "bf16", 2, 2),
        ({"fp16": {"enabled": False}, "bf16": {"enabled": True}}, "bf16", 2, 2),
        ({"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}, "bf16", 2, 4),
        ({"fp16": {}}, "fp32", 4, 4),
    ],
)
def test_precision(deepspeed, precision, model_bytes, accum_bytes):
    s = settings(deepspeed)
    assert (s.precision, s.model_bytes, s.accum_bytes) == (precision, model_bytes, accum_bytes)


@pytest.mark.parametrize(
    ("optimizer", "offloaded", "expected"),
    [
        ({"type": "AdamW"}, False, ("fused", 2, "FusedAdam", 0)),
        ({"type": "adamw", "params": {"torch_adam": True}}, False, ("foreach", 2, "torch.optim.AdamW", 1)),
        ({"type": "Adam", "params": {"torch_adam": True}}, False, ("foreach", 2, "torch.optim.AdamW", 1)),
        ({"type": "Adam", "params": {"torch_adam": True, "adam_w_mode": False, "weight_decay": 0.1}}, False, ("foreach", 2, "torch.optim.Adam", 1)),
        ({"type": "AdamW", "params": {"torch_adam": True, "fused": True}}, False, ("fused", 2, "torch.optim.AdamW", 0)),
        ({"type": "AdamW", "params": {"torch_adam": True, "foreach": False, "amsgrad": True}}, False, ("single", 3, "torch.optim.AdamW", 2)),
        ({"type": "AdamW", "params": {"torch_adam": True}}, True, ("cpu", 2, "torch.optim.AdamW", 0)),
        ({"type": "AdamW"}, True, ("cpu", 2, "DeepSpeedCPUAdam", 0)),
        ({"type": "SGD"}, False, ("foreach", 0, "torch.optim.SGD", 0)),
        ({"type": "SGD", "params": {"momentum": 0.9}}, False, ("foreach", 1, "torch.optim.SGD", 0)),
        ({"type": "Lion"}, False, ("fused", 1, "FusedLion", 0)),
        ({"type": "Lion"}, True, ("cpu", 2, "DeepSpeedCPULion", 0)),
        ({"type": "SGD", "params": {"momentum": 0.9, "weight_decay": 0.1}}, False, ("foreach", 1, "torch.optim.SGD", 1)),
        ({"type": "Adagrad"}, False, ("foreach", 1, "torch.optim.Adagrad", 2)),
        ({"type": "Adagrad"}, True, ("cpu", 1, "DeepSpeedCPUAdagrad", 0)),
        ({"type": "RMSprop", "params": {"momentum": 0.9, "centered": True, "weight_decay": 0.1}}, False, ("foreach", 3, "torch.optim.RMSprop", 2)),
        ({"type": "LAMB"}, False, ("fused", 2, "FusedLamb", 0)),
    ],
)
def test_optimizers(optimizer, offloaded, expected):
    section = {"stage": 2, **({"offload_optimizer": {"device": "cpu"}} if offloaded else {})}
    o = settings({"optimizer": optimizer, "zero_optimization": section}).optimizer
    assert (o.kernel, o.moments, o.implementation, o.foreach_temporaries) == expected


def test_an_optimizer_zero_does_not_know_is_told():
    assert [f.id for f in settings({"optimizer": {"type": "SGD"}, "zero_optimization": {"stage": 1}}).findings] == ["untested-optimizer"]
    for deepspeed in ({"zero_optimization": {"stage": 0}}, {"zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True}):
        assert settings({"optimizer": {"type": "SGD"}, **deepspeed}).findings == ()


def test_torchs_adagrad_leaves_a_first_instance_behind():
    for zero, zero_init, left in (({"stage": 2}, True, 1), ({"stage": 3}, True, 0), ({"stage": 3}, False, 1), ({"stage": 0}, True, 0)):
        o = settings({"optimizer": {"type": "Adagrad"}, "zero_optimization": zero}, zero_init=zero_init).optimizer
        assert (o.states_at_init, o.states_left_behind) == (True, left)


@pytest.mark.parametrize(
    ("trainer", "offloaded", "expected"),
    [
        ({}, False, ("fused", 2, "torch.optim.AdamW", 0, 0, 1)),
        ({"optim": "adamw_torch"}, False, ("foreach", 2, "torch.optim.AdamW", 1, 1, 0)),
        ({"optim": "sgd", "optim_args": "momentum=0.9", "weight_decay": 0.1}, False, ("foreach", 1, "torch.optim.SGD", 1, 0, 0)),
        ({"optim": "rmsprop", "weight_decay": 0.1}, False, ("foreach", 1, "torch.optim.RMSprop", 2, 1, 0)),
        ({"optim": "adafactor"}, False, ("single", 1, "transformers.Adafactor", 2, 2, 0)),
        ({}, True, ("cpu", 2, "DeepSpeedCPUAdam", 0, 0, 0)),
        ({"optim": "sgd"}, True, ("cpu", 2, "DeepSpeedCPUAdam", 0, 0, 0)),
    ],
)
def test_the_trainers_optimizers(trainer, offloaded, expected):
    section = {"stage": 2, **({"offload_optimizer": {"device": "cpu"}} if offloaded else {})}
    s = settings({"zero_optimization": section}, trainer=trainer)
    o = s.optimizer
    assert (o.kernel, o.moments, o.implementation, o.foreach_temporaries, o.undecayed_temporaries, o.step_scalars) == expected
    assert s.parameter_groups == "decay"


def test_an_optimizer_in_the_json_has_one_group_under_the_trainer_too():
    s = settings({"optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 2}}, trainer={"optim": "sgd"})
    assert (s.parameter_groups, s.optimizer.implementation) == ("one", "FusedAdam")


def test_a_package_beyond_torch_and_transformers_is_not_modelled():
    s = settings({"zero_optimization": {"stage": 2}}, trainer={"optim": "paged_adamw_8bit"})
    assert [f.key for f in s.not_modelled] == ["trainer.optim"]
    assert any("paged_adamw_8bit is not modelled" in note for note in s.notes)


@pytest.mark.parametrize(
    ("trainer", "zero", "words"),
    [
        ({"optim": "adamw_troch"}, {"stage": 2}, "did you mean 'adamw_torch'?"),
        ({"optim": "adagrad"}, {"stage": 1}, "fails under ZeRO"),
        ({"optim": "adafactor"}, {"stage": 2, "offload_optimizer": {"device": "cpu"}}, "CPUAdam"),
    ],
)
def test_what_the_trainers_optimizer_fails_at(trainer, zero, words):
    with pytest.raises(BadInput) as caught:
        settings({"zero_optimization": zero}, trainer=trainer)
    assert caught.value.field == "trainer.optim" and words in str(caught.value)


def test_arguments_that_change_memory_are_told_or_refused():
    assert [f.key for f in settings({}, trainer={"label_smoothing_factor": 0.1, "neftune_noise_alpha": None, "use_liger_kernel": True}).not_modelled] == ["trainer.use_liger_kernel", "trainer.label_smoothing_factor"]
    for trainer, field in (({"fsdp": "full_shard"}, "trainer.fsdp"), ({"gradient_checkpointing": True}, "gradient_checkpointing")):
        with pytest.raises(BadInput) as caught:
            settings({}, trainer=trainer)
        assert caught.value.field == field


def test_a_job_takes_checkpointing_from_the_trainer():
    job = {"model": "gpt2", "micro_batch": 4, "trainer": {"gradient_checkpointing": True, "use_cache": True}}
    assert (Setup.from_job(job).gradient_checkpointing, Setup.from_job(job).use_cache) == (True, True)
    job["trainer"]["gradient_checkpointing_kwargs"] = {"use_reentrant": True}
    assert Setup.from_job(job).gradient_checkpointing == {"use_reentrant": True}
    assert Setup.from_job({**job, "gradient_checkpointing": {"use_reentrant": False}}).gradient_checkpointing == {"use_reentrant": False}


# --- batch keys and "auto"


@pytest.mark.parametrize(
    ("deepspeed", "job", "steps", "total"),
    [
        ({}, {}, 1, 4),
        ({"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "train_batch_size": "auto"}, {}, 1, 4),
        ({"train_micro_batch_size_per_gpu": None, "gradient_accumulation_steps": None, "train_batch_size": None}, {}, 1, 4),
        ({"gradient_accumulation_steps": 3}, {"world_size": 2}, 3, 24),
        ({"train_batch_size": 64}, {"world_size": 8}, 2, 64),
        ({"gradient_accumulation_steps": "auto"}, {"trainer": {"gradient_accumulation_steps": 5}}, 5, 20),
        ({"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "train_batch_size": 8}, {}, 2, 8),
    ],
)
def test_batch_keys_are_filled(deepspeed, job, steps, total):
    s = settings(deepspeed, **job)
    assert s.gradient_accumulation_steps == s.config["gradient_accumulation_steps"] == steps
    assert s.config["train_batch_size"] == total
    assert s.config["train_micro_batch_size_per_gpu"] == 4


def test_the_trainers_auto_values():
    s = settings(
        {"bf16": {"enabled": "auto"}, "gradient_clipping": "auto", "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}},
         "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto"},
         "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}},
        trainer={"bf16": True, "max_grad_norm": 0.5, "learning_rate": 3e-4},
    )
    assert s.precision == "bf16" and s.gradient_clipping == 0.5
    assert s.config["optimizer"]["params"] == {"lr": 3e-4, "betas": [0.9, 0.999]}
    assert (s.reduce_bucket_size, s.prefetch_bucket_size, s.param_persistence_threshold) == (768 * 768, int(0.9 * 768 * 768), 7680)
    assert "scheduler" not in s.config
    assert "auto" not in str(s.config)


def test_auto_without_the_trainer_is_the_default_and_noted():
    s = settings({"bf16": {"enabled": "auto"}, **zero(stage=2, reduce_bucket_size="auto")})
    assert s.precision == "fp32" and s.reduce_bucket_size == 500_000_000
    assert sum("auto" in note for note in s.notes) == 2


def test_resolving_leaves_the_setup_as_it_was():
    setup = Setup(model="gpt2", micro_batch=4, deepspeed=zero(stage=2, reduce_bucket_size="auto"), trainer={})
    before = setup.to_job()
    resolve(setup)
    assert setup.to_job() == before


# --- noted, not refused


@pytest.mark.parametrize(
    ("section", "finding"),
    [
        ({"stage": 2, "offload_param": {"device": "cpu"}}, "offload-param-ignored"),
        ({"stage": 0, "offload_optimizer": {"device": "cpu"}}, "offload-optimizer-ignored"),
        ({"stage": 1, "offload_optimizer": {"device": "nvme", "nvme_path": "/data"}}, "nvme-is-cpu"),
        ({"stage": 3, "offload_optimizer": {"device": "nvme"}}, "nvme-path-missing"),
        ({"stage": 2, "stage3_max_live_parameters": 1}, "stage3-key-ignored"),
        ({"stage": 2, "allgather_bucket_size": 1000}, "allgather-key-ignored"),
    ],
)
def test_what_deepspeed_ignores_is_a_finding_and_a_note(section, finding):
    s = settings(zero(**section))
    assert finding in [f.id for f in s.findings]
    found = next(f for f in s.findings if f.id == finding)
    assert any(found.text in note and found.key in note for note in s.notes)


def test_ignored_parameter_offload_is_estimated_as_none():
    s = settings(zero(stage=2, offload_param={"device": "cpu"}, offload_optimizer={"device": "cpu"}))
    assert s.offload_param is None
    assert s.offload_optimizer.device == "cpu" and s.offload_optimizer.pin_memory is True


# --- refused: the field that is named, words of the way out


BAD = {
    "unknown zero key": (zero(stage=2, reduce_bucket=1), "deepspeed.zero_optimization.reduce_bucket", "did you mean 'reduce_bucket_size'"),
    "unknown offload key": (zero(stage=2, offload_optimizer={"devise": "cpu"}), "deepspeed.zero_optimization.offload_optimizer.devise", "did you mean 'device'"),
    "stage 4": (zero(stage=4), "deepspeed.zero_optimization.stage", "choose 0, 1, 2 or 3"),
    "stage negative": (zero(stage=-1), "deepspeed.zero_optimization.stage", "at least 0"),
    "stage true": (zero(stage=True), "deepspeed.zero_optimization.stage", "whole number"),
    "stage 2.5": (zero(stage=2.5), "deepspeed.zero_optimization.stage", "whole number"),
    "stage null": (zero(stage=None), "deepspeed.zero_optimization.stage", "whole number"),
    "5e8 as text": (zero(stage=2, reduce_bucket_size="5e8"), "deepspeed.zero_optimization.reduce_bucket_size", "write 500000000 without quotes"),
    "a word for a number": (zero(stage=2, reduce_bucket_size="big"), "deepspeed.zero_optimization.reduce_bucket_size", "whole number"),
    "negative bucket": (zero(stage=2, reduce_bucket_size=-1), "deepspeed.zero_optimization.reduce_bucket_size", "at least"),
    "infinite as text": (zero(stage=2, reduce_bucket_size="inf"), "deepspeed.zero_optimization.reduce_bucket_size", "whole number"),
    "absurd bucket": (zero(stage=2, reduce_bucket_size=10**25), "deepspeed.zero_optimization.reduce_bucket_size", "no machine"),
    "list for a bucket": (zero(stage=2, reduce_bucket_size=[1]), "deepspeed.zero_optimization.reduce_bucket_size", "whole number"),
    "a word for truth": (zero(stage=2, overlap_comm="maybe"), "deepspeed.zero_optimization.overlap_comm", "true or false"),
    "device gpu": (zero(stage=2, offload_optimizer={"device": "gpu"}), "deepspeed.zero_optimization.offload_optimizer.device", "none, cpu or nvme"),
    "device a list": (zero(stage=2, offload_optimizer={"device": ["cpu"]}), "deepspeed.zero_optimization.offload_optimizer.device", "none, cpu or nvme"),
    "offload a text": (zero(stage=2, offload_optimizer="cpu"), "deepspeed.zero_optimization.offload_optimizer", "object"),
    "offload ratio": (zero(stage=3, offload_optimizer={"device": "cpu", "ratio": 1.5}), "deepspeed.zero_optimization.offload_optimizer.ratio", "0 to 1"),
    "old and new offload": (zero(stage=2, cpu_offload=True, offload_optimizer={"device": "cpu"}), "deepspeed.zero_optimization.cpu_offload", "keep offload_optimizer"),
    "zero a list": ({"zero_optimization": [2]}, "deepspeed.zero_optimization", "object"),
    "zero true": ({"zero_optimization": True}, "deepspeed.zero_optimization", "object"),
    "both precisions": ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "deepspeed.bf16.enabled", "turn one of them off"),
    "fp16 not an object": ({"fp16": True}, "deepspeed.fp16", "object"),
    "enabled a word": ({"fp16": {"enabled": "maybe"}}, "deepspeed.fp16.enabled", "true or false"),
    "micro-batch disagrees": ({"train_micro_batch_size_per_gpu": 5}, "micro_batch", "is 4 but deepspeed.train_micro_batch_size_per_gpu is 5"),
    "total disagrees": ({"gradient_accumulation_steps": 2, "train_batch_size": 9}, "deepspeed.train_batch_size", "4 × 2 × 1 = 8"),
    "total not divisible": ({"train_batch_size": 9}, "deepspeed.train_batch_size", "does not divide"),
    "accumulation zero": ({"gradient_accumulation_steps": 0}, "deepspeed.gradient_accumulation_steps", "at least 1"),
    "accumulation a word": ({"gradient_accumulation_steps": "two"}, "deepspeed.gradient_accumulation_steps", "whole number"),
    "accumulation absurd": ({"gradient_accumulation_steps": 10**12}, "deepspeed.gradient_accumulation_steps", "no machine"),
    "clipping a text": ({"gradient_clipping": "1"}, "deepspeed.gradient_clipping", "number"),
    "clipping negative": ({"gradient_clipping": -1}, "deepspeed.gradient_clipping", "at least 0"),
    "accumulation dtype": ({"data_types": {"grad_accum_dtype": "float32"}}, "deepspeed.data_types.grad_accum_dtype", "fp32, fp16 or bf16"),
    "optimizer without type": ({"optimizer": {"params": {}}}, "deepspeed.optimizer", "\"type\""),
    "optimizer a text": ({"optimizer": "AdamW"}, "deepspeed.optimizer", "\"type\""),
    "optimizer unknown": ({"optimizer": {"type": "OneBitAdam"}}, "deepspeed.optimizer.type", "choose one of"),
    "optimizer in the wrong case": ({"optimizer": {"type": "sgd"}}, "deepspeed.optimizer.type", "write 'SGD'"),
    "optimizer that needs a closure": ({"optimizer": {"type": "LBFGS"}}, "deepspeed.optimizer.type", "closure"),
    "lamb offloaded": ({"optimizer": {"type": "Lamb"}, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}, "deepspeed.optimizer.type", "GPU only"),
    "clipping in the optimizer": ({"optimizer": {"type": "AdamW", "params": {"max_grad_norm": 1.0}}}, "deepspeed.optimizer.params.max_grad_norm", "gradient_clipping"),
    "optimizer params a list": ({"optimizer": {"type": "AdamW", "params": [1]}}, "deepspeed.optimizer.params", "object"),
    "auto that nothing fills": ({"optimizer": {"type": "AdamW", "params": {"amsgrad": "auto"}}}, "deepspeed.optimizer.params.amsgrad", "nothing fills"),
}


@pytest.mark.parametrize(("deepspeed", "field", "words"), BAD.values(), ids=BAD)
def test_what_deepspeed_refuses_is_one_sentence(deepspeed, field, words):
    with pytest.raises(BadInput) as caught:
        settings(deepspeed)
    assert caught.value.field == field
    assert words in str(caught.value)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


ODD = {
    "scheduler a list": {"scheduler": []},
    "scheduler params a list": {"scheduler": {"type": "WarmupLR", "params": ["auto"]}},
    "data_types a text": {"data_types": "fp32"},
    "betas auto in a list": {"optimizer": {"type": "AdamW", "params": {"betas": ["auto", "auto"]}}},
    "numbers for keys": {"optimizer": {"type": "AdamW", "params": {"lr": [1, 2]}}, "7": 1},
    "nested autos": {"activation_checkpointing": {"partition_activations": "auto"}},
}


@pytest.mark.parametrize("deepspeed", ODD.values(), ids=ODD)
def test_oddities_end_in_settings_or_one_sentence_never_in_a_traceback(deepspeed):
    try:
        assert settings(deepspeed).stage == 0
    except BadInput as error:
        assert error.field.startswith("deepspeed.")


@pytest.mark.parametrize("trainer", [{"gradient_accumulation_steps": "x"}, {"max_grad_norm": "x"}, {"gradient_accumulation_steps": None}, {"learning_rate": {}}])
def test_trainer_values_of_wrong_kinds_are_one_sentence(trainer):
    deepspeed = {"gradient_accumulation_steps": "auto", "gradient_clipping": "auto"}
    try:
        assert settings(deepspeed, trainer=trainer).stage == 0
    except BadInput as error:
        assert "\n" not in str(error)
