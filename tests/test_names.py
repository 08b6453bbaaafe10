"""The grammar of tensor names: what is an expert and of which layer, and that nothing merely alike is."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sm70_convert import names
from sm70_convert.names import ExpertName, format_ranges, parse, parse_ranges

PREFIXES = (
    "model.",
    "model.language_model.",
    "language_model.model.",
    "model.model.",
    "model.language_model.model.language_model.",
)
PROJECTIONS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}
PARTS = ("weight", "qweight", "qzeros", "scales", "weight_scale", "weight_scale_2", "input_scale", "g_idx", "a.b_2")

prefixes = st.lists(st.sampled_from(["model.", "language_model."]), min_size=1, max_size=4).map("".join)
numbers = st.integers(0, 999_999)
modules = st.sampled_from(["mlp", "block_sparse_moe"])
projections = st.sampled_from(sorted(PROJECTIONS))
parts = st.sampled_from(PARTS)


@given(prefixes, numbers, modules, numbers, projections, parts, st.booleans())
def test_every_expert_name_is_read_back(
    prefix: str, layer: int, module: str, expert: int, projection: str, part: str, index_last: bool
) -> None:
    base = f"{prefix}layers.{layer}.{module}.experts"
    inner = f"{projection}.{{}}" if index_last else f"{{}}.{projection}"
    name = f"{base}.{inner.format(expert)}.{part}"
    template = f"{base}.{inner.format('{expert}')}.{part}"
    assert parse(name) == ExpertName(prefix, layer, expert, PROJECTIONS[projection], part, template)
    assert template.replace("{expert}", str(expert)) == name
    assert names.layer_inside_experts(name) == names.layer_of(name) == layer
    assert names.experts_module(name) == base
    assert names.router_layer(name) is None


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize(
    ("rest", "expert", "projection", "part"),
    [
        ("experts.7.gate_proj.qweight", 7, "gate", "qweight"),
        ("experts.0.w2.scales", 0, "down", "scales"),
        ("experts.up_proj.12.weight_scale_2", 12, "up", "weight_scale_2"),
        ("experts.w3.3.qzeros", 3, "up", "qzeros"),
        ("experts.gate_up_proj", None, "gate_up", "weight"),
        ("experts.gate_up_proj.weight", None, "gate_up", "weight"),
        ("experts.gate_up_proj_weight_scale", None, "gate_up", "weight_scale"),
        ("experts.gate_up_proj.weight_scale_2", None, "gate_up", "weight_scale_2"),
        ("experts.down_proj", None, "down", "weight"),
        ("experts.down_proj_scale", None, "down", "weight_scale"),
        ("experts.down_proj_scale_2", None, "down", "weight_scale_2"),
        ("experts.down_proj_input_scale", None, "down", "input_scale"),
        ("experts.down_proj.qweight", None, "down", "qweight"),
    ],
)
def test_names_as_exporters_write_them(prefix: str, rest: str, expert: int | None, projection: str, part: str) -> None:
    found = parse(f"{prefix}layers.31.mlp.{rest}")
    assert found is not None
    assert (found.prefix, found.layer, found.expert, found.projection, found.part) == (
        prefix,
        31,
        expert,
        projection,
        part,
    )
    assert found.template.format(expert=expert) == f"{prefix}layers.31.mlp.{rest}"


NO_EXPERTS = (
    "model.layers.0.mlp.gate.weight",
    "model.layers.0.mlp.gate.qweight",
    "model.layers.0.mlp.gate_proj.qweight",
    "model.layers.0.mlp.shared_expert.gate_proj.qweight",
    "model.layers.0.mlp.shared_experts.gate_proj.weight",
    "model.layers.0.mlp.shared_expert_gate.weight",
    "model.layers.0.self_attn.experts.0.gate_proj.weight",
    "model.layers.0.mlp.experts_0.gate_proj.weight",
    "model.layers.0.mlp.experts",
    "model.layers.0.mlp.expert.0.gate_proj.weight",
    "model.layers.0.mlp.mlp.experts.0.gate_proj.weight",
    "mtp.layers.0.mlp.experts.0.gate_proj.weight",
    "model.mtp.layers.0.mlp.experts.0.gate_proj.weight",
    "model.visual.layers.0.mlp.experts.0.gate_proj.weight",
    "layers.0.mlp.experts.0.gate_proj.weight",
    "xmodel.layers.0.mlp.experts.0.gate_proj.weight",
    "model.layers.00.mlp.experts.0.gate_proj.weight",
    "model.layers.-1.mlp.experts.0.gate_proj.weight",
    "model.layers.1000000.mlp.experts.0.gate_proj.weight",
    "model.layers.١.mlp.experts.0.gate_proj.weight",  # an Arabic digit
    "model.embed_tokens.weight",
    "",
)
NOT_UNDERSTOOD = (
    "model.layers.0.mlp.experts.0.gate_proj",
    "model.layers.0.mlp.experts.0.gate_proj.",
    "model.layers.0.mlp.experts.0.gate.weight",
    "model.layers.0.mlp.experts.0.gate_up_proj.weight",
    "model.layers.0.mlp.experts.0.w4.weight",
    "model.layers.0.mlp.experts.01.gate_proj.weight",
    "model.layers.0.mlp.experts.-1.gate_proj.weight",
    "model.layers.0.mlp.experts.1000000.gate_proj.weight",
    "model.layers.0.mlp.experts.٣.gate_proj.weight",
    "model.layers.0.mlp.experts.0.gate_proj.0.weight/x",
    "model.layers.0.mlp.experts.0.gate_proj.weight\n",
    "model.layers.0.mlp.experts.0.gate_proj.wéight",
    "model.layers.0.mlp.experts.gate_proj.weight",
    "model.layers.0.mlp.experts.gate_up_projection",
    "model.layers.0.mlp.experts.gate_up_proj_",
    "model.layers.0.mlp.experts.gate_up_proj.0.weight",
    "model.layers.0.mlp.experts.w13.weight",
    "model.layers.0.mlp.experts.weight_scale_2",
    "model.layers.0.mlp.experts.",
)


@pytest.mark.parametrize("name", NO_EXPERTS)
def test_what_is_no_expert_is_none_by_every_function(name: str) -> None:
    assert parse(name) is None
    assert names.layer_inside_experts(name) is None
    with pytest.raises(ValueError, match=re.escape(f"{name!r} lies in no experts module")):
        names.experts_module(name)


@pytest.mark.parametrize("name", NOT_UNDERSTOOD)
def test_what_lies_in_the_experts_but_is_not_understood_is_still_placed(name: str) -> None:
    assert parse(name) is None
    assert names.layer_inside_experts(name) == 0
    assert names.experts_module(name) == "model.layers.0.mlp.experts"


WORDS = ("layers", "mlp", "experts", "gate_proj")
GOOD = "model.layers.12.mlp.experts.34.gate_proj.qweight"


@given(st.sampled_from(WORDS), st.data())
def test_a_name_with_one_wrong_character_in_a_fixed_word_does_not_parse(word: str, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(word) - 1), label="at")
    old = word[at]
    new = data.draw(st.sampled_from(["", old * 2, old.upper(), "x", ".", "_", " ", "é"]), label="new")
    wrong = word[:at] + new + word[at + 1 :]
    if wrong != word:
        assert parse(GOOD.replace(word, wrong)) is None


@given(st.sampled_from(["12", "34"]), st.text(min_size=0, max_size=8))
def test_only_a_plain_number_stands_for_a_number(number: str, text: str) -> None:
    name = GOOD.replace(f".{number}.", f".{text}.")
    plain = re.fullmatch("0|[1-9][0-9]{0,5}", text) is not None
    assert (parse(name) is not None) == plain


@given(st.text(max_size=60))
def test_any_text_before_or_after_a_name_is_no_part_of_it(text: str) -> None:
    extended = parse(f"{text}{GOOD}")
    assert (extended is not None) == (re.fullmatch(r"((model|language_model)\.)*", text) is not None)
    longer = parse(f"{GOOD}{text}")
    assert (longer is not None) == (re.fullmatch(r"[A-Za-z0-9_.]*", text) is not None)


@given(st.text())
def test_no_text_is_too_odd_for_the_grammar(text: str) -> None:
    assert parse(text) is None
    assert names.layer_of(text) is None


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("model.layers.4.mlp.gate.weight", 4),
        ("language_model.model.layers.40.block_sparse_moe.gate.weight", 40),
        ("model.layers.4.mlp.gate.bias", None),
        ("model.layers.4.mlp.gate_proj.weight", None),
        ("model.layers.4.mlp.shared_expert_gate.weight", None),
        ("model.layers.4.mlp.gate.weight.x", None),
        ("mtp.layers.4.mlp.gate.weight", None),
    ],
)
def test_a_router_is_known_by_its_weight(name: str, layer: int | None) -> None:
    assert names.router_layer(name) == layer


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("model.layers.0.input_layernorm.weight", 0),
        ("model.language_model.layers.61.self_attn.q_proj.weight", 61),
        ("model.layers.0", None),
        ("model.norm.weight", None),
        ("mtp.layers.0.x", None),
        ("model.visual.layers.0.x", None),
    ],
)
def test_a_name_belongs_to_a_decoder_layer_or_to_none(name: str, layer: int | None) -> None:
    assert names.layer_of(name) == layer


# Ranges.
@given(st.sets(st.integers(0, 200) | numbers, min_size=1))
def test_ranges_round_trip(chosen: set[int]) -> None:
    text = format_ranges(chosen)
    assert parse_ranges(text) == tuple(sorted(chosen))
    assert format_ranges(parse_ranges(text)) == text


@given(st.sets(st.integers(0, 60)))
def test_ranges_are_as_short_as_they_can_be(chosen: set[int]) -> None:
    text = format_ranges(chosen)
    starts = [n for n in chosen if n - 1 not in chosen]
    assert len(text.split(",")) == max(len(starts), 1)
    assert text == "" or re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", text)


@pytest.mark.parametrize(
    ("numbers_", "text"),
    [([], ""), ([3], "3"), ([1, 0], "0-1"), ([0, 1, 2, 3, 7], "0-3,7"), ([5, 5, 9, 10], "5,9-10")],
)
def test_ranges_are_written_so(numbers_: list[int], text: str) -> None:
    assert format_ranges(numbers_) == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0-3,7", (0, 1, 2, 3, 7)), ("7,0-3", (0, 1, 2, 3, 7)), (" 1 - 2 , 2-3", (1, 2, 3)), ("007", (7,)), ("4-4", (4,))],
)
def test_ranges_are_read_so(text: str, expected: tuple[int, ...]) -> None:
    assert parse_ranges(text) == expected


@pytest.mark.parametrize(
    "text", ["", ",", "1,", ",1", "-1", "1-", "1--2", "1-2-3", "a", "1;2", "1.5", "1000000", "٣", "+1", "0x1", "1 2"]
)
def test_what_is_no_list_of_ranges_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{text!r} is not a list of numbers and ranges such as 0-3,7")):
        parse_ranges(text)


def test_a_range_that_runs_backwards_is_refused() -> None:
    with pytest.raises(ValueError, match="'7-3' runs backwards"):
        parse_ranges("1, 7-3")


@given(st.text(alphabet="0123456789,- a", max_size=7))
def test_whatever_is_read_is_written_back_to_the_same_numbers(text: str) -> None:
    try:
        found = parse_ranges(text)
    except ValueError:
        return
    assert found == tuple(sorted(set(found)))
    assert parse_ranges(format_ranges(found)) == found
