"""The DeepSpeed part: what is read, filled, refused, and merely noted. Defaults are DeepSpeed 0.19.8's."""

from __future__ import annotations

import pytest

from explorer.dsconfig import Settings, resolve, sections
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
    assert [f.key for f in s.findings] == ["trainer.optim"]


def test_every_optim_of_the_trainer_is_known():
    names = pytest.importorskip("transformers.training_args").OptimizerNames
    for optim in names:
        assert settings(zero(stage=0), trainer={"optim": optim.value}).optimizer.moments >= 0


def test_a_package_beyond_torch_and_transformers_is_not_modelled():
    s = settings({"zero_optimization": {"stage": 2}}, trainer={"optim": "ademamix_8bit"})
    assert [f.key for f in s.not_modelled] == ["trainer.optim"]
    assert any("ademamix_8bit is not modelled" in note for note in s.notes)


@pytest.mark.parametrize(
    ("trainer", "zero", "words"),
    [
        ({"optim": "adamw_troch"}, {"stage": 2}, 'did you mean \"adamw_torch\"'),
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
    "unknown zero key": (zero(stage=2, reduce_bucket=1), "deepspeed.zero_optimization.reduce_bucket", 'did you mean \"reduce_bucket_size\"'),
    "unknown offload key": (zero(stage=2, offload_optimizer={"devise": "cpu"}), "deepspeed.zero_optimization.offload_optimizer.devise", 'did you mean \"device\"'),
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
    "accumulation dtype": ({"data_types": {"grad_accum_dtype": "float8"}}, "deepspeed.data_types.grad_accum_dtype", "fp32, fp16 or bf16"),
    "optimizer without type": ({"optimizer": {"params": {}}}, "deepspeed.optimizer", "\"type\""),
    "optimizer a text": ({"optimizer": "AdamW"}, "deepspeed.optimizer", "\"type\""),
    "optimizer unknown": ({"optimizer": {"type": "OneBitAdam"}}, "deepspeed.optimizer.type", "choose one of"),
    "optimizer in the wrong case": ({"optimizer": {"type": "sgd"}}, "deepspeed.optimizer.type", 'write "SGD"'),
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


# --- beside the real DeepSpeedConfig


def on(section, **keys):
    return {section: {"enabled": True, **keys}}


ALIKE: dict[str, dict] = {
    "nothing": {}, "stage 2": zero(stage=2), "stage as text": zero(stage="2"), "stage 2.0": zero(stage=2.0), "stage 4": zero(stage=4), "stage -1": zero(stage=-1), "stage null": zero(stage=None), "stage auto": zero(stage="auto"),
    "the old form on": {"zero_optimization": True}, "the old form off": {"zero_optimization": False}, "zero null": {"zero_optimization": None}, "zero a list": {"zero_optimization": []}, "zero a text": {"zero_optimization": "2"},
    "bucket 5e8": zero(reduce_bucket_size=5e8), "bucket '5e8'": zero(reduce_bucket_size="5e8"), "bucket ' 500 '": zero(reduce_bucket_size=" 500 "), "bucket '5_00'": zero(reduce_bucket_size="5_00"), "bucket '_5'": zero(reduce_bucket_size="_5"),
    "bucket '500.0'": zero(reduce_bucket_size="500.0"), "bucket '500.'": zero(reduce_bucket_size="500."), "bucket 0": zero(reduce_bucket_size=0), "bucket null": zero(reduce_bucket_size=None),
    "truth 1.0": zero(overlap_comm=1.0), "truth 2": zero(overlap_comm=2), "truth 'T'": zero(overlap_comm="T"), "truth ' true'": zero(overlap_comm=" true"), "truth null": zero(contiguous_gradients=None),
    "unknown in zero": zero(reduce_bucket=1), "removed in zero": zero(stage=3, mics_shard_size=2), "old offload": zero(stage=2, cpu_offload=True), "old and new offload": zero(stage=2, cpu_offload=False, offload_optimizer={"device": "cpu"}),
    "a name twice": zero(stage=3, stage3_prefetch_bucket_size=1, prefetch_bucket_size=2), "old and new gather": zero(stage=3, stage3_gather_fp16_weights_on_model_save=True, stage3_gather_16bit_weights_on_model_save=True),
    "offload null": zero(stage=2, offload_optimizer=None), "offload a text": zero(stage=2, offload_optimizer="cpu"), "device CPU": zero(stage=2, offload_optimizer={"device": "CPU"}), "device auto": zero(stage=2, offload_optimizer={"device": "auto"}),
    "ratio at stage 2": zero(stage=2, offload_optimizer={"device": "cpu", "ratio": 0.5}), "ratio at stage 3": zero(stage=3, offload_optimizer={"device": "cpu", "ratio": "0.5"}), "ratio 2": zero(stage=3, offload_optimizer={"device": "cpu", "ratio": 2}),
    "nvme path a number": zero(stage=3, offload_param={"device": "nvme", "nvme_path": 5}), "no norm at stage 3": zero(stage=3, compute_grad_norm=False), "no norm": {**zero(stage=2, compute_grad_norm=False), "gradient_clipping": 0},
    "zenflow": zero(stage=2, zenflow={}), "zenflow ratio": zero(stage=2, zenflow={"topk_ratio": 1}), "zenflow unknown": zero(stage=2, zenflow={"topk": 2}), "zenflow interval": zero(stage=2, zenflow={"update_interval": 0}), "leaf text": zero(stage=3, leaf_module={"classes": "A"}), "leaf unknown": zero(stage=3, leaf_module={"class": ["A"]}),
    "amp": {"amp": {"enabled": False}}, "sparse gradients": {"sparse_gradients": False}, "elasticity": {"elasticity": {}}, "old curriculum": {"curriculum_learning": {}}, "layer drop": on("progressive_layer_drop"), "unknown at the top": {"gradient_acumulation_steps": 2},
    "steps '4'": {"gradient_accumulation_steps": "4"}, "steps 2.0": {"gradient_accumulation_steps": 2.0}, "steps null": {"gradient_accumulation_steps": None}, "steps 0": {"gradient_accumulation_steps": 0}, "steps a list": {"gradient_accumulation_steps": []},
    "total '4'": {"train_batch_size": "4"}, "total 9": {"train_batch_size": 9}, "total 8": {"train_batch_size": 8},
    "optimizer null": {"optimizer": None}, "optimizer a text": {"optimizer": "AdamW"}, "type a number": {"optimizer": {"type": 5}}, "params null": {"optimizer": {"type": "AdamW", "params": None}}, "params a list": {"optimizer": {"type": "AdamW", "params": [1]}},
    "scheduler null": {"scheduler": None}, "scheduler a list": {"scheduler": []}, "scheduler empty": {"scheduler": {}},
    "data types a list": {"data_types": []}, "data types null": {"data_types": None}, "float32": {"data_types": {"grad_accum_dtype": "float32"}}, "kept a text": {"data_types": {"keep_in_fp32_modules": "x"}}, "kept a list": {"data_types": {"keep_in_fp32_modules": ["x"]}},
    "fp16 null": {"fp16": None}, "fp16 true": {"fp16": True}, "scale x": on("fp16", loss_scale="x"), "scale '0'": on("fp16", loss_scale="0"), "scale true": {"fp16": {"loss_scale": True}}, "scale -1": {"fp16": {"loss_scale": -1}}, "scale auto": on("fp16", loss_scale="auto"),
    "window 0": on("fp16", loss_scale_window=0), "window 0 unused": {"fp16": {"loss_scale_window": 0}}, "window 1.5": {"fp16": {"loss_scale_window": 1.5}}, "power x": {"fp16": {"initial_scale_power": "x"}}, "fp16 unknown": on("fp16", opt_level="O2"),
    "bf16 null": {"bf16": None}, "bf16 unknown": on("bf16", loss_scale=0), "bf16 enabled null": {"bf16": {"enabled": None}}, "both": {**on("fp16"), **on("bf16")}, "old name": on("bfloat16"), "old name and fp16": {**on("bfloat16"), **on("fp16")},
    "masters at stage 0": on("bf16", bf16_master_weights_and_grads=True), "states alone": {**on("bf16", bf16_optimizer_states=True), **zero(stage=2)}, "masters offloaded": {**on("fp16", fp16_master_weights_and_grads=True), **zero(stage=2, offload_optimizer={"device": "cpu"})},
    "autocast null": {"torch_autocast": None}, "autocast dtype": on("torch_autocast", dtype="zzz"), "autocast dtype unused": {"torch_autocast": {"dtype": "zzz"}}, "autocast over bf16": {**on("torch_autocast", dtype="bf16"), **on("bf16")}, "autocast modules": {"torch_autocast": {"lower_precision_safe_modules": [5]}},
    "clipping -1": {"gradient_clipping": -1}, "sent in fp32": {"communication_data_type": "FP32"}, "sent in float32": {"communication_data_type": "float32"}, "sent in 5": {"communication_data_type": 5}, "sum": {"gradient_allreduce_op": "sum"}, "sum at stage 3": {"gradient_allreduce_op": "sum", **zero(stage=3)}, "max": {"gradient_allreduce_op": "max"},
    "pipeline": {"pipeline": {"stages": 2}}, "pipeline null": {"pipeline": None}, "split unknown": {"tensor_parallel": {"size": 2}}, "split null": {"tensor_parallel": None}, "split x": {"tensor_parallel": {"autotp_size": "x"}}, "hybrid": on("hybrid_engine"), "hybrid unknown": {"hybrid_engine": {"enable": True}},
    "compile": {"compile": {"deepcompile": True}}, "compile unknown": on("compile"), "compile passes": {"compile": {"passes": ["zz"]}}, "checkpointing": {"activation_checkpointing": {"partition_activations": True, "x": 1}}, "checkpointing null": {"activation_checkpointing": None},
    "profiler null": {"flops_profiler": None}, "breakdown x": {"wall_clock_breakdown": "x"}, "comms logger": on("comms_logger"), "comms logger unknown": on("comms_logger", prof=1), "tensorboard unknown": on("tensorboard", path="x"), "wandb null": {"wandb": None},
    "aio null": {"aio": None}, "aio a list": {"aio": [1]}, "tag": {"checkpoint": {"tag_validation": "zz"}}, "write": {"checkpoint": {"parallel_write": {"pipeline_stage": "x"}}}, "curriculum": on("data_efficiency", data_sampling={"curriculum_learning": {"enabled": True}}), "tuning": {"autotuning": {"results_dir": ""}},
    "timers unknown": {"timers": {"throughput": {"x": 1}}}, "experts balanced": {"expert_parallel": {"load_balance_coeff": 1}}, "quantization unknown": {"weight_quantization": {"x": 1}}, "vocabulary x": {"vocabulary_size": "x"},
}
"""Both take it or both refuse it."""

STRICTER: dict[str, tuple[dict, str]] = {
    "a truth for a number": (zero(stage=True), "pydantic reads true as 1, which nobody means by it"),
    "more than any machine holds": (zero(reduce_bucket_size=10**25), "torch could not make the buffer"),
    "half a step": ({"gradient_accumulation_steps": 1.5}, "the engine never comes to a step's end"),
    "no type": ({"optimizer": {}}, "it waits for an optimizer from the code"),
    "no such optimizer": ({"optimizer": {"type": "Foo"}}, "the engine looks for it later"),
    "clipping as a parameter": ({"optimizer": {"type": "AdamW", "params": {"max_grad_norm": 1}}}, "the engine refuses it later"),
    "no such type": ({"data_types": {"grad_accum_dtype": "zzz"}}, "the engine reads it later"),
    "weights of another type": ({"data_types": {"param_dtype": "bf16"}}, "the engine asserts it later"),
    "masters on the GPU": ({**on("fp16", fp16_master_weights_and_grads=True), **zero(stage=2)}, "the engine asserts it later"),
    "no norm, but clipping": (zero(stage=2, compute_grad_norm=False), "the engine refuses it later"),
    "autocast to fp32": (on("torch_autocast", dtype="fp32"), "torch warns, and casts nothing"),
    "autocast to nothing": (on("torch_autocast"), "DeepSpeed has no default, and its buffers then have no type"),
    "autocast by a text": ({"torch_autocast": {"enabled": "false", "dtype": "bf16"}}, "any text is true"),
    "a schedule without parameters": ({"scheduler": {"type": "WarmupLR"}}, "the engine unpacks null later"),
    "no such schedule": ({"scheduler": {"type": "WarmupLRR"}}, "the engine looks for it later"),
    "clipping null": ({"gradient_clipping": None}, "the first step fails on None > 0"),
    "clipping as text": ({"gradient_clipping": "1"}, "the first step fails on '1' > 0"),
    "a list of timers": ({"timers": []}, "it only asks whether \"throughput\" is in it"),
    "two GPUs of one": ({"sequence_parallel_size": 2}, "world_size then is a half"),
}
"""What DeepSpeedConfig lets pass and resolve does not, each with the reason."""


def taken_by_deepspeed(deepspeed: dict) -> bool:
    import copy

    from deepspeed.runtime.config import DeepSpeedConfig

    try:
        DeepSpeedConfig({"train_micro_batch_size_per_gpu": 4, **copy.deepcopy(deepspeed)})
    except Exception:  # its refusals are of many kinds
        return False
    return True


def taken_here(deepspeed: dict) -> bool:
    try:
        settings(deepspeed)
    except BadInput as error:
        assert "\n" not in str(error) and len(str(error)) < 400
        return False
    return True


@pytest.mark.parametrize("deepspeed", ALIKE.values(), ids=ALIKE)
def test_deepspeed_and_we_take_and_refuse_the_same(deepspeed):
    pytest.importorskip("deepspeed")
    assert taken_here(deepspeed) == taken_by_deepspeed(deepspeed)


@pytest.mark.parametrize("deepspeed", [config for config, _ in STRICTER.values()], ids=STRICTER)
def test_what_deepspeed_reads_and_cannot_run_is_refused(deepspeed):
    pytest.importorskip("deepspeed")
    assert taken_by_deepspeed(deepspeed) and not taken_here(deepspeed)


def test_the_sections_are_deepspeeds_own():
    """Every section's keys and defaults, against the class that reads it."""
    pytest.importorskip("deepspeed")
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.compile.config import CompileConfig
    from deepspeed.inference.config import WeightQuantConfig
    from deepspeed.monitor.config import CometConfig, CSVConfig, TensorBoardConfig, WandbConfig
    from deepspeed.runtime import config as top
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig
    from deepspeed.runtime.zenflow.zenflow_config import ZenFlowConfig
    from deepspeed.runtime.zero.leaf_module_config import DeepSpeedZeroLeafModuleConfig
    from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

    theirs = {
        "fp16": DeepSpeedFP16Config, "bf16": DeepSpeedBF16Config, "tensor_parallel": TPTrainingConfig, "hybrid_engine": top.HybridEngineConfig, "compile": CompileConfig, "weight_quantization": WeightQuantConfig,
        "comms_logger": CommsLoggerConfig, "tensorboard": TensorBoardConfig, "csv_monitor": CSVConfig, "wandb": WandbConfig, "comet": CometConfig,
    }
    assert set(theirs) == set(sections.SECTIONS)
    for name, model in theirs.items():
        keys = sections.SECTIONS[name]
        assert set(keys) == {written for field_name, field in model.model_fields.items() for written in (field_name, field.alias) if written}
        for field_name, field in model.model_fields.items():
            assert keys[field_name].kind == "any" or keys[field_name].default == field.get_default(call_default_factory=True), field_name
    for keys, model in ((sections.ZENFLOW, ZenFlowConfig), (sections.LEAF_MODULE, DeepSpeedZeroLeafModuleConfig), (sections.THROUGHPUT, DeepSpeedThroughputTimerConfig)):
        assert set(keys) == set(model.model_fields)
    assert set(sections.REMOVED) == set(top._REMOVED_TOP_LEVEL_CONFIG_KEYS)
    assert set(sections.REMOVED_ZERO) == set(top._REMOVED_ZERO_CONFIG_KEYS)


def test_schedules_are_deepspeeds_and_torchs():
    schedules = pytest.importorskip("deepspeed.runtime.lr_schedules")
    import torch

    torchs = {name for name, made in vars(torch.optim.lr_scheduler).items() if isinstance(made, type) and issubclass(made, torch.optim.lr_scheduler.LRScheduler) and not name.startswith("_")} - {"LRScheduler"}
    assert set(sections.SCHEDULES) == {*schedules.VALID_LR_SCHEDULES, *torchs}


def test_every_key_deepspeed_asks_for_is_known():
    """`param_dict.get("…")` and the like in the file that reads the JSON."""
    constants = pytest.importorskip("deepspeed.runtime.constants")
    import inspect
    import re

    from deepspeed.runtime import config as top

    source = inspect.getsource(top)
    asked = set(re.findall(r"get_scalar_param\(\s*param_dict,\s*([A-Z_]+)", source)) | set(re.findall(r"param_dict\.get\(([A-Z_]+)", source))
    names = {getattr(constants, name) for name in asked if hasattr(constants, name)}
    assert len(names) > 15 and names <= sections.KNOWN


# --- what is ignored, and what is not followed


def test_an_unknown_key_at_the_top_is_told_with_the_nearest():
    (found,) = settings({"gradient_acumulation_steps": 2, "optimizer": {"type": "AdamW"}}).findings
    assert (found.id, found.key) == ("unknown-key", "gradient_acumulation_steps")
    assert 'did you mean "gradient_accumulation_steps"?' in found.text


def test_the_precision_that_the_trainer_sets_needs_no_word_on_the_other():
    both = {"fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}, **zero(stage=2)}
    assert not any("taken as off" in note for note in settings(both, trainer={"bf16": True}).notes)
    assert sum("taken as off" in note for note in settings(both, trainer={}).notes) == 2


def test_a_key_that_belongs_deeper_is_told_where():
    (found,) = settings({"stage3_max_live_parameters": 1, "optimizer": {"type": "AdamW"}}).findings
    assert found.key == "stage3_max_live_parameters" and "belongs in zero_optimization" in found.text


def test_many_unknown_keys_are_told_in_a_few_words():
    import time

    before = time.thread_time()
    s = settings({f"key{i}\x1b[31m": i for i in range(30_000)})
    assert time.thread_time() - before < 5, "a spelling search for each would take minutes"
    assert len(s.findings) == 21 and "29980 more keys" in s.findings[-1].text
    assert all(note.isprintable() and len(note) < 300 for note in s.notes)


NOT_FOLLOWED = {
    "tensor_parallel.autotp_size": ({"tensor_parallel": {"autotp_size": 2}}, {"world_size": 4}, "at most"),
    "sequence_parallel_size": ({"sequence_parallel_size": 4}, {"world_size": 4}, "at most"),
    "expert_parallel.enabled": (on("expert_parallel"), {}, "no bound"),
    "hybrid_engine.enabled": (on("hybrid_engine"), {}, "at least"),
    "compile.deepcompile": ({"compile": {"deepcompile": True}}, {}, "no bound"),
    "data_efficiency.data_sampling.curriculum_learning.enabled": (on("data_efficiency", data_sampling={"curriculum_learning": {"enabled": True, "curriculum_metrics": {}}}), {}, "at most"),
    "data_efficiency.data_sampling.dynamic_batching.enabled": (on("data_efficiency", data_sampling=on("dynamic_batching")), {}, "no bound"),
    "data_efficiency.data_routing.random_ltd.enabled": (on("data_efficiency", data_routing=on("random_ltd")), {}, "at most"),
    "torch_autocast.enabled": ({**on("torch_autocast", dtype="bf16"), **on("bf16")}, {}, "at least"),
    "torch_autocast.lower_precision_safe_modules": (on("torch_autocast", dtype="bf16", lower_precision_safe_modules=["torch.nn.Linear"]), {}, "no bound"),
    "weight_quantization.quantized_initialization": ({"weight_quantization": {"quantized_initialization": {"num_bits": 4}}, **zero(stage=3)}, {}, "at most"),
    "data_types.buffer_dtype": ({"data_types": {"buffer_dtype": "bf16"}}, {}, "buffers"),
    "communication_data_type": ({"communication_data_type": "fp32", **on("bf16"), **zero(stage=2, reduce_bucket_size=1 << 28)}, {}, "one bucket (1.0 GiB)"),
    "managed_gradient_accumulation": ({"managed_gradient_accumulation": False}, {}, "no bound"),
    "zero_optimization.use_multi_rank_bucket_allreduce": (zero(stage=2, use_multi_rank_bucket_allreduce=False), {}, "no bound"),
    "zero_optimization.compute_grad_norm": ({**zero(stage=2, compute_grad_norm=False), "gradient_clipping": 0}, {}, "at most"),
    "bf16.immediate_grad_update": ({**on("bf16", immediate_grad_update=True), **zero(stage=1), "data_types": {"grad_accum_dtype": "fp32"}}, {}, "at most"),
    "fp16.fp16_master_weights_and_grads": ({**on("fp16", fp16_master_weights_and_grads=True), **zero(stage=2, offload_optimizer={"device": "cpu"})}, {}, "at most"),
    "zero_optimization.zero_hpz_partition_size": (zero(stage=3, zero_hpz_partition_size=8), {}, "at least"),
    "zero_optimization.zero_quantized_weights": (zero(stage=3, zero_quantized_weights=True), {}, "no bound"),
    "zero_optimization.zero_quantized_nontrainable_weights": (zero(stage=3, zero_quantized_nontrainable_weights=True), {}, "at most"),
    "zero_optimization.zero_quantized_gradients": (zero(stage=3, zero_quantized_gradients=True), {"world_size": 16}, "no bound"),
    "zero_optimization.stage3_module_granularity_threshold": (zero(stage=3, stage3_module_granularity_threshold=10), {}, "no bound"),
    "zero_optimization.leaf_module": (zero(stage=3, leaf_module={"names": ["h"]}), {}, "no bound"),
    "zero_optimization.stage3_use_all_reduce_for_fetch_params": (zero(stage=3, stage3_use_all_reduce_for_fetch_params=True), {}, "at most"),
    "zero_optimization.stage3_allgather_sequential": (zero(stage=3, stage3_allgather_sequential=True), {}, "at most"),
    "zero_optimization.offload_optimizer.ratio": (zero(stage=3, offload_optimizer={"device": "cpu", "ratio": 0.9}), {}, "leaves 10%"),
    "zero_optimization.offload_optimizer.super_offload": (zero(stage=3, offload_optimizer={"device": "cpu", "super_offload": True}), {}, "no bound"),
    "zero_optimization.zenflow": (zero(stage=2, offload_optimizer={"device": "cpu"}, zenflow={}), {}, "at least"),
    "optimizer.legacy_fusion": ({"optimizer": {"type": "AdamW", "legacy_fusion": True}}, {}, "no bound"),
    "gradient_checkpointing.early_stop": ({}, {"gradient_checkpointing": {"use_reentrant": False, "early_stop": False}}, "at least"),
}


@pytest.mark.parametrize("key", NOT_FOLLOWED)
def test_what_is_not_followed_is_told_with_its_bound(key):
    deepspeed, job, words = NOT_FOLLOWED[key]
    s = settings(deepspeed, **job)
    (found,) = s.not_modelled
    assert found.key == key and words in found.text
    assert f"{key}: {found.text}" in s.notes


QUIET = {
    "comments": {"_comment": "x", "//": "y", "#": "z"},
    "off by a text": {"hybrid_engine": {"enabled": "off"}, "compile": {"deepcompile": "False"}, "bf16": {"bf16_optimizer_states": "no"}},
    "off": {"hybrid_engine": {"enabled": False}, "tensor_parallel": {"autotp_size": 1}, "compile": {"deepcompile": False}, "expert_parallel": {"enabled": False}, "data_efficiency": {"enabled": False}},
    "at its default": zero(stage=3, zero_hpz_partition_size=1, memory_efficient_linear=True, offload_optimizer={"device": "cpu", "ratio": 1.0}),
    "in the same type": {"communication_data_type": "bf16", **on("bf16")},
    "acted on elsewhere": {**on("bf16", immediate_grad_update=True), **zero(stage=2), "weight_quantization": {"quantized_initialization": {"num_bits": 4}}},
    "no memory in it": {"wall_clock_breakdown": True, "steps_per_print": 10, "comms_logger": {"enabled": True}, "tensorboard": {"enabled": False}, "dump_state": True, "prescale_gradients": False},
    "auto": {**zero(stage=3, zero_quantized_weights="auto", offload_optimizer={"device": "cpu", "super_offload": "auto", "ratio": "auto"}), "bf16": {"enabled": True, "immediate_grad_update": "auto"}},
}


@pytest.mark.parametrize("deepspeed", QUIET.values(), ids=QUIET)
def test_what_moves_no_memory_is_not_told(deepspeed):
    s = settings(deepspeed)
    assert (s.not_modelled, s.findings) == ((), ())


@pytest.mark.parametrize("key", ["activation_checkpointing", "pipeline"])
def test_what_people_expect_to_save_memory_and_does_nothing(key):
    (found,) = settings({key: {"partition_activations": True}}).findings
    assert found.key == key and "does nothing" in found.text


@pytest.mark.parametrize("key", ["sub_group_size", "zero_hpz_partition_size", "zero_quantized_weights", "stage3_max_live_parameters", "max_live_parameters"])
def test_stage_3_keys_at_stage_2_are_told(key):
    (found,) = settings(zero(stage=2, **{key: 2 if "size" in key or "max" in key else True})).findings
    assert (found.id, found.key) == ("stage3-key-ignored", f"zero_optimization.{key}")


def test_gpus_that_share_a_sequence_see_the_same_samples():
    s = settings({"sequence_parallel_size": 2, "train_batch_size": 32}, world_size=8)
    assert (s.gradient_accumulation_steps, s.config["train_batch_size"]) == (2, 32)


REFUSED_BY_THE_ENGINE = {
    "lamb with a fixed scale": ({"optimizer": {"type": "Lamb"}, **on("fp16", loss_scale=128)}, "deepspeed.fp16.loss_scale"),
    "muon at stage 3": ({"optimizer": {"type": "Muon"}, **zero(stage=3)}, "deepspeed.zero_optimization.reduce_scatter"),
    "prescaled with reduce-scatter": ({"prescale_gradients": True, **zero(stage=2)}, "deepspeed.prescale_gradients"),
    "unmanaged with overlap": ({"managed_gradient_accumulation": False, **zero(stage=1, overlap_comm=True)}, "deepspeed.managed_gradient_accumulation"),
    "no norm with offload": ({"gradient_clipping": 0, **zero(stage=2, compute_grad_norm=False, offload_optimizer={"device": "cpu"})}, "deepspeed.zero_optimization.compute_grad_norm"),
}


@pytest.mark.parametrize(("deepspeed", "field"), REFUSED_BY_THE_ENGINE.values(), ids=REFUSED_BY_THE_ENGINE)
def test_what_the_engine_refuses_later(deepspeed, field):
    with pytest.raises(BadInput) as caught:
        settings(deepspeed)
    assert caught.value.field == field


# --- the Trainer's arguments


def test_the_arguments_are_transformers_own():
    transformers = pytest.importorskip("transformers")
    from dataclasses import fields

    from explorer.dsconfig.arguments import NAMES

    assert {f.name for f in fields(transformers.TrainingArguments) if f.init} == NAMES


TRAINER_BAD = {
    "misspelt": ({"gradient_acumulation_steps": 2}, {}, {}, "trainer.gradient_acumulation_steps", 'did you mean "gradient_accumulation_steps"'),
    "of another program": ({"zzz": 2}, {}, {}, "trainer.zzz", "leave it out"),
    "batch": ({"per_device_train_batch_size": 8}, {}, {}, "micro_batch", "is 4 but trainer.per_device_train_batch_size is 8"),
    "batch a text": ({"per_device_train_batch_size": "4"}, {}, {}, "trainer.per_device_train_batch_size", "write 4 without quotes"),
    "steps": ({"gradient_accumulation_steps": 2}, {"gradient_accumulation_steps": 4}, {}, "deepspeed.gradient_accumulation_steps", "is 4 but trainer.gradient_accumulation_steps is 2"),
    "total": ({"gradient_accumulation_steps": 2}, {"train_batch_size": 4}, {}, "deepspeed.train_batch_size", "4 × 2 × 1 = 8"),
    "bf16 off there": ({"bf16": True}, {"bf16": {"enabled": False}}, {}, "deepspeed.bf16.enabled", "is false but trainer.bf16 is true"),
    "fp16 on there": ({"fp16": False}, {"fp16": {"enabled": True}}, {}, "deepspeed.fp16.enabled", "is true but trainer.fp16 is false"),
    "both": ({"bf16": True, "fp16": True}, {}, {}, "trainer.bf16", "turn one of them off"),
    "bf16 here, fp16 there": ({"bf16": True}, {"fp16": {"enabled": True}}, {}, "deepspeed.bf16.enabled", "turn one of them off"),
    "truth as text": ({"bf16": "false"}, {}, {}, "trainer.bf16", "without quotes"),
    "rate as text": ({"learning_rate": "1e-5"}, {}, {}, "trainer.learning_rate", "without quotes"),
    "checkpointing off there": ({"gradient_checkpointing": False}, {}, {"gradient_checkpointing": True}, "gradient_checkpointing", "is true but trainer.gradient_checkpointing is false"),
    "checkpointing otherwise": ({"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}, {}, {"gradient_checkpointing": {"use_reentrant": False}}, "gradient_checkpointing", "trainer.gradient_checkpointing_kwargs is {"),
    "checkpointing by a text": ({"gradient_checkpointing": True, "gradient_checkpointing_kwargs": "x"}, {}, {"gradient_checkpointing": True}, "trainer.gradient_checkpointing_kwargs", "give an object"),
    "cache": ({"use_cache": True}, {}, {}, "use_cache", "is false but trainer.use_cache is true"),
    "optim a list": ({"optim": ["sgd"]}, {}, {}, "trainer.optim", 'is ["sgd"]; give a text'),
    "optim null": ({"optim": None}, {}, {}, "trainer.optim", "is null; give a text"),
    "auto that nothing fills": ({}, {"zero_optimization": {"stage": 2, "overlap_comm": "auto"}}, {}, "deepspeed.zero_optimization.overlap_comm", "neither the Trainer nor accelerate fills"),
    "auto in a scheduler": ({}, {"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "auto"}}}, {}, "deepspeed.scheduler.params.warmup_type", "neither the Trainer nor accelerate fills"),
    "zero in the old form": ({}, {"zero_optimization": True}, {}, "deepspeed.zero_optimization", "is true; give an object"),
    "bf16 by its old name": ({"bf16": True}, {"bfloat16": {"enabled": True}}, {}, "deepspeed.bfloat16", 'write "bf16"'),
}


@pytest.mark.parametrize(("trainer", "deepspeed", "job", "field", "words"), TRAINER_BAD.values(), ids=TRAINER_BAD)
def test_where_the_trainer_and_the_job_disagree(trainer, deepspeed, job, field, words):
    with pytest.raises(BadInput) as caught:
        settings(deepspeed, trainer=trainer, **job)
    assert caught.value.field == field and words in str(caught.value)


def test_what_disagrees_and_moves_no_memory_is_told():
    deepspeed = {"gradient_clipping": 0.5, "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "betas": [0.9, 0.999], "weight_decay": "auto"}}, **zero(stage=2)}
    found = [f for f in settings(deepspeed, trainer={"weight_decay": 0.1}).findings if f.id == "trainer-disagrees"]
    assert [f.key for f in found] == ["optimizer.params.lr", "gradient_clipping"]
    assert "is 1e-05 but trainer.learning_rate is 5e-05" in found[0].text
    assert not settings(deepspeed, trainer={"learning_rate": 1e-5, "max_grad_norm": 0.5}).findings


@pytest.mark.parametrize(("params", "trainer", "keys"), [
    ({"warmup_max_lr": 1e-4, "warmup_num_steps": 10}, {}, ["scheduler.params.warmup_max_lr", "scheduler.params.warmup_num_steps"]),
    ({"warmup_max_lr": 1e-4, "warmup_num_steps": 10}, {"learning_rate": 1e-4, "warmup_steps": 10}, []),
    ({"warmup_max_lr": "auto", "warmup_num_steps": "auto", "warmup_min_lr": 1e-9}, {"warmup_steps": 10}, []),
    ({"warmup_num_steps": 10}, {"warmup_steps": 0.1}, []),  # a tenth of all steps: only the data set says
])
def test_a_scheduler_that_disagrees_is_told(params, trainer, keys):
    found = [f for f in settings({**zero(stage=2), "scheduler": {"type": "WarmupLR", "params": params}}, trainer=trainer).findings if f.id == "trainer-disagrees"]
    assert [f.key for f in found] == keys
    assert not keys or "- ds scheduler.params.warmup_max_lr=0.0001 vs hf learning_rate=5e-05" in found[0].text


def test_the_trainer_agrees_with_the_real_one():
    """`HfTrainerDeepSpeedConfig` fills and compares; its mismatches are our findings and refusals."""
    integration = pytest.importorskip("transformers.integrations.deepspeed")
    from types import SimpleNamespace

    def theirs(deepspeed, **given):
        usual = {"world_size": 1, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "max_grad_norm": 1.0, "learning_rate": 5e-5, "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8, "weight_decay": 0.0, "save_on_each_node": False}
        arguments = SimpleNamespace(**{**usual, **dict.fromkeys(("fp16", "bf16", "fp16_full_eval", "bf16_full_eval"), False), **given})
        config = integration.HfTrainerDeepSpeedConfig({"train_micro_batch_size_per_gpu": "auto", **deepspeed})
        config.trainer_config_process(arguments)
        return len(config.mismatches)

    def ours(deepspeed, **given):
        try:
            s = settings(deepspeed, trainer=given)
        except BadInput:
            return 1
        return sum(f.id == "trainer-disagrees" for f in s.findings)

    adam = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "betas": [0.9, 0.95], "eps": "auto"}}}
    for deepspeed, given in (
        ({}, {}), (adam, {}), (adam, {"learning_rate": 1e-5}), (adam, {"learning_rate": 1e-5, "adam_beta2": 0.95}), ({"gradient_clipping": 1}, {}), ({"gradient_clipping": 0}, {}),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-4, "warmup_min_lr": 1e-6}}}, {}), ({"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-4}}}, {"learning_rate": 1e-4}),
        (on("bf16"), {"bf16": True}), (on("bf16"), {"bf16": False}), ({"bf16": {"enabled": False}}, {"bf16": True}), ({"bf16": {"enabled": "auto"}}, {"bf16": True}), ({"gradient_accumulation_steps": 2}, {"gradient_accumulation_steps": 2}), ({"gradient_accumulation_steps": 2}, {"gradient_accumulation_steps": 3}),
    ):
        assert ours({**zero(stage=2), **deepspeed}, **given) == theirs(deepspeed, **given), (deepspeed, given)


def test_what_accelerate_fills():
    s = settings({"fp16": {"enabled": True}, **zero(stage="auto", stage3_gather_16bit_weights_on_model_save="auto", offload_optimizer={"device": "auto"})}, trainer={})
    assert (s.stage, s.offload_optimizer) == (2, None)
    assert any("stage: \"auto\" is 2" in note for note in s.notes)
    assert any("fp16.enabled is true and no trainer part sets fp16" in note for note in s.notes)
    assert settings(zero(stage="auto")).stage == 0
    assert "trainer-wants-zero" in [f.id for f in settings({}, trainer={}).findings]
    assert settings({"bf16": {"enabled": "auto"}, **zero(stage=2)}, trainer={"bf16_full_eval": True}).precision == "bf16"


# --- the card


@pytest.mark.parametrize(
    ("deepspeed", "job", "field", "words"),
    [
        ({}, {"attention": "flash_attention_2"}, "attention", "computes in fp32"),
        (on("fp16"), {"attention": "flash_attention_2", "gpu": "T4"}, "attention", "T4 is older"),
        (on("fp16"), {"attention": "flash_attention_2", "gpu": "V100-32GB"}, "attention", "choose sdpa"),
        ({}, {"gpu": "T4", "capacity_gib": 40}, "capacity_gib", "T4 has 14."),
        ({}, {"gpu": "K80"}, "gpu", "is not a known card"),
    ],
)
def test_what_the_card_cannot_do(deepspeed, job, field, words):
    with pytest.raises(BadInput) as caught:
        settings(deepspeed, **job)
    assert caught.value.field == field and words in str(caught.value)


def test_what_the_card_can_do():
    for deepspeed, job in ((on("bf16"), {"gpu": "A10"}), (on("torch_autocast", dtype="bf16"), {"gpu": "H200"}), (on("fp16"), {"gpu": "MI300X"}), (on("fp16"), {})):
        assert settings(deepspeed, attention="flash_attention_2", **job).stage == 0
    assert settings({}, gpu="T4", capacity_gib=14).stage == 0


def test_accelerate_fills_and_refuses_the_same_autos():
    """The real plugin over `HfTrainerDeepSpeedConfig`, as `Accelerator.prepare` calls it."""
    pytest.importorskip("accelerate")
    from accelerate.utils import DeepSpeedPlugin
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    def theirs(deepspeed):
        try:
            plugin = DeepSpeedPlugin(hf_ds_config=HfTrainerDeepSpeedConfig(deepspeed))
            plugin.deepspeed_config_process(must_match=False, **{"gradient_clipping": 1.0, "zero_optimization.stage3_gather_16bit_weights_on_model_save": False})
        except (ValueError, AttributeError):
            return None
        return plugin.deepspeed_config["zero_optimization"]

    def ours(deepspeed):
        try:
            return settings(deepspeed, trainer={}).config["zero_optimization"]
        except BadInput:
            return None

    for deepspeed in (
        zero(stage="auto", offload_optimizer={"device": "auto", "nvme_path": "auto"}, stage3_gather_16bit_weights_on_model_save="auto"), {"zero_optimization": True}, zero(stage=2, overlap_comm="auto"),
        {**zero(stage=2), "fp16": {"loss_scale": "auto"}}, {**zero(stage=2), "steps_per_print": "auto"}, {**zero(stage=2), "flops_profiler": {"top_modules": "auto"}}, {**zero(stage=2), "gradient_clipping": "auto"},
    ):
        assert ours(deepspeed) == theirs(deepspeed), deepspeed


# --- the optimizer's parameters


def test_parameters_are_those_of_the_classes():
    torch = pytest.importorskip("torch")
    pytest.importorskip("deepspeed")
    import inspect

    from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
    from deepspeed.ops.lamb import FusedLamb
    from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion

    from explorer.dsconfig.parameters import OF_ADAM, TAKEN

    classes = {c.__name__: c for c in (FusedAdam, DeepSpeedCPUAdam, FusedLion, DeepSpeedCPULion, DeepSpeedCPUAdagrad, FusedLamb)}
    for implementation, taken in TAKEN.items():
        made = classes.get(implementation) or getattr(torch.optim, implementation.rpartition(".")[2])
        given = {"adam_w_mode", "adamw_mode", "fp32_optimizer_states"} if "Adam" in implementation and implementation in classes else {"max_grad_norm"}
        assert taken == set(inspect.signature(made).parameters) - {"params", "model_params"} - given, implementation
    assert OF_ADAM == {"torch_adam", "adam_w_mode", "fp32_optimizer_states"}


@pytest.mark.parametrize(
    ("optimizer", "key", "words"),
    [
        ({"type": "AdamW", "params": {"learning_rate": 1e-5}}, "learning_rate", "of FusedAdam"),
        ({"type": "AdamW", "params": {"weight_deacy": 0.1}}, "weight_deacy", 'did you mean "weight_decay"?'),
        ({"type": "AdamW", "params": {"foreach": True}}, "foreach", "of FusedAdam"),
        ({"type": "AdamW", "params": {"lr": "1e-5"}}, "lr", "without quotes"),
        ({"type": "SGD", "params": {"lr": 0.1, "betas": [0.9, 0.999]}}, "betas", "of torch.optim.SGD"),
        ({"type": "Lion", "params": {"eps": 1e-8}}, "eps", "of FusedLion"),
        ({"type": "Adam", "params": {"betas": 0.9}}, "betas", "two numbers"),
    ],
)
def test_a_parameter_that_the_class_does_not_take(optimizer, key, words):
    with pytest.raises(BadInput) as caught:
        settings({"optimizer": optimizer})
    assert caught.value.field == f"deepspeed.optimizer.params.{key}" and words in str(caught.value)


def test_parameters_that_deepspeed_takes_out_are_no_slip():
    for params in ({"torch_adam": True, "foreach": False, "maximize": True}, {"adam_w_mode": False, "bias_correction": True}, {"fp32_optimizer_states": True}):
        assert settings({"optimizer": {"type": "Adam", "params": {"lr": 1e-5, **params}}}).optimizer.name == "adam"
    assert settings({"optimizer": {"type": "Muon", "params": {"muon_lr": 0.02, "adam_lr": 1e-3, "anything": 1}}}).optimizer.name == "muon"
