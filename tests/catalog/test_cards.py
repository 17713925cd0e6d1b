"""GPU cards: names in any writing, capacities as PyTorch shows them, kernels by generation."""

from __future__ import annotations

import pytest

from explorer.catalog import cards, find_card
from explorer.errors import BadInput
from explorer.units import GiB, KiB, MiB


def test_all_cards_of_the_catalog_smallest_first():
    names = [card.name for card in cards()]
    assert set(names) == {"T4", "V100-16GB", "V100-32GB", "A10", "RTX 3090", "RTX 4090", "L4", "L40S", "A100-40GB", "A100-80GB", "H100-80GB", "H200", "B200", "MI300X"}
    totals = [card.total_bytes for card in cards()]
    assert totals == sorted(totals) and all(isinstance(total, int) for total in totals)


@pytest.mark.parametrize(("name", "advertised"), [("T4", 16), ("V100-32GB", 32), ("RTX 4090", 24), ("L40S", 48), ("A100-40GB", 40), ("A100-80GB", 80), ("H100-80GB", 80), ("H200", 141), ("B200", 192), ("MI300X", 192)])
def test_pytorch_shows_a_little_less_than_the_label(name, advertised):
    total = find_card(name).total_bytes
    assert 0.9 * advertised * 10**9 < total < 1.08 * advertised * GiB


@pytest.mark.parametrize("written", ["A100-80GB", "a100-80gb", "A100 80GB", "a10080gb", "NVIDIA A100-80GB", " a100_80GB "])
def test_any_writing(written):
    assert find_card(written).name == "A100-80GB"


@pytest.mark.parametrize(
    ("written", "card"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"), ("NVIDIA A100-PCIE-40GB", "A100-40GB"), ("NVIDIA A100 80GB PCIe", "A100-80GB"), ("NVIDIA H100 80GB HBM3", "H100-80GB"), ("Tesla T4", "T4"),
        ("Tesla V100-SXM2-32GB", "V100-32GB"), ("NVIDIA GeForce RTX 4090", "RTX 4090"), ("NVIDIA L4", "L4"), ("NVIDIA L40S", "L40S"), ("AMD Instinct MI300X OAM", "MI300X"),
    ],
)
def test_a_card_by_what_its_driver_calls_it(written, card):
    assert find_card(written).name == card


@pytest.mark.parametrize("written", ["NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA A10G", "NVIDIA GB200"])
def test_a_smaller_card_of_a_like_name_is_another(written):
    with pytest.raises(BadInput, match="is not a known card"):
        find_card(written)


@pytest.mark.parametrize(("name", "generation", "workspace"), [
    ("T4", "older", 8 * MiB + 128 * KiB), ("V100-16GB", "older", 8 * MiB + 128 * KiB), ("A100-40GB", "ampere", 8 * MiB + 128 * KiB),
    ("L4", "ampere", 8 * MiB + 128 * KiB), ("H100-80GB", "hopper", 32 * MiB), ("H200", "hopper", 32 * MiB), ("B200", "hopper", 32 * MiB), ("MI300X", "ampere", 8 * MiB + 128 * KiB),
])
def test_kernels_and_workspaces(name, generation, workspace):
    card = find_card(name)
    assert (card.attention_generation, card.cublas_workspace_bytes) == (generation, workspace)


@pytest.mark.parametrize(("name", "words"), [("A100", "A100-40GB"), ("H100", "H100-80GB"), ("Z9000", "capacity_gib"), ("", "capacity_gib"), ("gpu" * 200, "capacity_gib")])
def test_an_unknown_card_is_one_sentence_with_names(name, words):
    with pytest.raises(BadInput) as caught:
        find_card(name)
    assert caught.value.field == "gpu" and words in str(caught.value)


def test_each_number_says_where_it_comes_from():
    assert all(card.source and card.outside_source for card in cards())


@pytest.mark.parametrize(("name", "offered"), [("A100", "A100-40GB, A100-80GB"), ("V100", "V100-16GB, V100-32GB"), ("H100-96GB", "H100-80GB"), ("A1O0-80GB", "A100-80GB, H100-80GB, A100-40GB")])
def test_names_offered_are_of_that_card_and_the_smaller_comes_first(name, offered):
    with pytest.raises(BadInput, match=f"choose one of {offered}[,] or give"):
        find_card(name)
