"""The page's address brings the page back, and a bad one never breaks it."""

from __future__ import annotations

import pytest

from explorer.setup import Setup
from explorer.ui import address, fields
from explorer.ui.state import ExplorerState


def test_the_opening_page_has_no_query(bench):
    assert ExplorerState().to_query() == ""


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "gpt2", "micro_batch": 8, "stage": "3", "offload_param": "nvme", "nvme_path": "/a b&c=d"},
        {"gradient_checkpointing": True, "precision": "fp32", "gpu": "none", "reduce_bucket_size": 200_000_000},
        {"model": "custom", "config_text": '{"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4}'},
    ],
)
def test_a_link_restores_the_state(bench, changes):
    first = ExplorerState()
    first.update(**changes)
    second = ExplorerState()
    second.from_query("?" + first.to_query())
    assert second.setup == first.setup
    assert second.notices == ()


def test_a_job_that_controls_cannot_say_travels_whole(bench):
    setup = Setup(model="gpt2", micro_batch=2, lora=None, padding=True, deepspeed={"bf16": {"enabled": True}, "zero_optimization": {"stage": 1, "round_robin_gradients": True}})
    first, second = ExplorerState(setup), ExplorerState()
    second.from_query(first.query)
    assert second.setup == setup
    second.micro_batch = 3
    third = ExplorerState()
    third.from_query(second.query)
    assert third.setup == setup.replace(micro_batch=3)


@pytest.mark.parametrize("query", ["stage=7", "job=%%%", "job=abcd", "config=zzz", "optimizer=<script>", "job=" + address.pack('{"model": 3}'), "job=" + address.pack("[1]")])
def test_what_an_address_says_wrongly_is_left_out_with_a_notice(bench, query):
    state = ExplorerState()
    state.from_query(query)
    assert len(state.notices) == 1
    assert state.setup == fields.default_setup()


def test_a_wrong_number_in_an_address_stays_as_typed(bench):
    state = ExplorerState()
    state.from_query("micro_batch=lots")
    assert state.micro_batch == "lots"
    assert state.problem[0] == "micro_batch"
    assert "micro_batch=lots" in state.to_query()


def test_a_text_that_inflates_without_end_is_refused():
    with pytest.raises(ValueError):
        address.unpack(address.pack("0" * 30_000_000))


@pytest.mark.parametrize(
    "query",
    [
        "job=" + address.pack('{"model":"gpt2","micro_batch":4}') + "&micro_batch=7",
        "job=" + address.pack('{"model":"gpt2","micro_batch":4,"deepspeed":{"zero_optimization":null}}'),
        "job=" + address.pack('{"model":"\\ud800","micro_batch":4}'),
        "config=" + address.pack('{"model_type":"\ud800"}'),
    ],
)
def test_no_address_breaks_the_page(query):
    from explorer.ui.state import ExplorerState

    state = ExplorerState()
    state.from_query(query)
    state.from_query("model=gpt2&reduce_bucket_size=0&stage=2")
    assert isinstance(state.to_query(), str)
