"""The many ways in which exporters spell the same checkpoint: each gives the banks of the plain spelling, or a clear refusal."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from click.testing import CliRunner, Result

from made import (
    EXPERTS,
    INDEX,
    LEFT_OUT,
    PROJECTIONS,
    SINGLE,
    Made,
    awq,
    bf16,
    expert_tensors,
    f32,
    fuse,
    nvfp4,
    tensor,
)
from sm70_convert.cli import main

MARKER = {"format_version": 1, "manifest": "sm70/manifest.json"}
SENTINEL = "sm70_prepared_checkpoint.load_with_load_format_sm70_prepared"
FORMATS: dict[str, Callable[..., Made]] = {"awq": awq, "nvfp4": nvfp4}
PARTS = ("weight", "weight_scale", "weight_scale_2", "input_scale")

Edit = Callable[[Made], object]


def run(source: Path, out: Path) -> Result:
    return CliRunner().invoke(main, [str(source), "--out", str(out), "--jobs", "1", "--json"])


def seal(made: Made, folder: Path) -> Any:
    """Writes `made`, converts it into `folder`/out; gives the --json document."""
    result = run(made.write(folder / "source"), folder / "out")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def telling(document: Any) -> list[Any]:
    """The findings, without that of every layer with input_scale."""
    return [f for f in document["findings"] if f["message"] != LEFT_OUT]


def refuse(made: Made, folder: Path, code: int) -> list[str]:
    """Writes `made`, which must be refused with `code`; gives its problems."""
    out = folder / "out"
    result = run(made.write(folder / "source"), out)
    assert result.exit_code == code, result.output
    assert not out.exists()
    problems = json.loads(result.stdout)["error"]["problems"]
    return [f"{p.get('tensor') or p.get('file')}: {p['message']}" for p in problems]


def banks(folder: Path) -> dict[str, bytes]:
    root = folder / "out" / "sm70" / "tp1"
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in sorted(root.rglob("*.safetensors"))}


def passed_through(folder: Path) -> set[str]:
    """The names that the output's index lists, besides the sentinel."""
    return {*json.loads((folder / "out" / INDEX).read_bytes())["weight_map"]} - {SENTINEL}


def pairs(path: Path) -> Any:
    """A JSON file with its order kept in what it compares to: lists of pairs, not dicts."""
    return json.loads(path.read_bytes(), object_pairs_hook=list)


def ordered(value: object) -> Any:
    return json.loads(json.dumps(value), object_pairs_hook=list)


PLAIN: dict[tuple[object, ...], dict[str, bytes]] = {}  # many spellings are compared with the same checkpoint


def assert_same_banks(made: Made, plain: Made, tmp_path: Path) -> Any:
    """Both convert, to the same banks; gives the document of the first."""
    document = seal(made, tmp_path / "made")
    key = (json.dumps(plain.config), *plain.tensors.items())
    if key not in PLAIN:
        seal(plain, tmp_path / "plain")
        PLAIN[key] = banks(tmp_path / "plain")
    assert banks(tmp_path / "made") == PLAIN[key] != {}
    return document


# Keys of config.json.
def rename_key(old: str, new: str) -> Edit:
    return lambda m: _rename(m.config, old, new)


def rename_quantization_key(old: str, new: str) -> Edit:
    return lambda m: _rename(m.quantization, old, new)


def _rename(document: dict[str, Any], old: str, new: str) -> None:
    items = [(new if key == old else key, value) for key, value in document.items()]
    document.clear()
    document.update(items)


def quantization(**fields: object) -> Edit:
    return lambda m: m.quantization.update(fields)


def both(*edits: Edit) -> Edit:
    return lambda m: [edit(m) for edit in edits]


def nest(*keys: str) -> Edit:
    """Moves `keys` into text_config, which a vision model's config.json has."""

    def edit(made: Made) -> None:
        made.config["text_config"] = {key: made.config.pop(key) for key in keys}
        made.config["vision_config"] = {"hidden_size": 7, "num_hidden_layers": 5}

    return edit


SIZES = ("hidden_size", "moe_intermediate_size", "num_experts", "num_experts_per_tok", "num_hidden_layers")


def nested_format(made: Made) -> None:
    """quantization_config as hf_quant_config.json has it."""
    old = made.config["quantization_config"]
    fields = {"quant_algo": old["quant_algo"], "group_size": 16, "exclude_modules": old["ignore"]}
    made.config["quantization_config"] = {"quant_method": "modelopt", "quantization": fields}


class Spelling(NamedTuple):
    make: Callable[..., Made]
    edit: Edit


SPELLINGS = {
    "awq-w_bit": Spelling(awq, rename_quantization_key("bits", "w_bit")),
    "awq-q_group_size": Spelling(awq, rename_quantization_key("group_size", "q_group_size")),
    "awq-both-old": Spelling(
        awq, both(rename_quantization_key("bits", "w_bit"), rename_quantization_key("group_size", "q_group_size"))
    ),
    "awq-version-in-capitals": Spelling(awq, quantization(version="GEMM")),
    "awq-version-as-checkpoint_format": Spelling(awq, rename_quantization_key("version", "checkpoint_format")),
    "awq-no-version": Spelling(awq, lambda m: m.quantization.pop("version")),
    "awq-method-in-capitals": Spelling(awq, quantization(quant_method="AWQ")),
    "nvfp4-algorithm-in-small-letters": Spelling(nvfp4, quantization(quant_algo="nvfp4")),
    "nvfp4-algorithm-in-mixed-case": Spelling(nvfp4, quantization(quant_algo="Nvfp4")),
    "nvfp4-algorithm-w4a16": Spelling(nvfp4, quantization(quant_algo="W4A16_NVFP4")),
    "nvfp4-algorithm-w4a16-in-small-letters": Spelling(nvfp4, quantization(quant_algo="w4a16_nvfp4")),
    "nvfp4-method-modelopt_fp4": Spelling(nvfp4, quantization(quant_method="modelopt_fp4")),
    "nvfp4-nested-as-in-hf_quant_config": Spelling(nvfp4, nested_format),
    "nvfp4-flat-group_size": Spelling(nvfp4, both(lambda m: m.quantization.pop("config_groups"), quantization(group_size=16))),
    "nvfp4-no-group-size": Spelling(nvfp4, lambda m: m.quantization.pop("config_groups")),
    **{
        f"{name}-{what}": Spelling(make, edit)
        for name, make in FORMATS.items()
        for what, edit in (
            ("num_local_experts", rename_key("num_experts", "num_local_experts")),
            ("n_routed_experts", rename_key("num_experts", "n_routed_experts")),
            ("dtype", rename_key("torch_dtype", "dtype")),
            ("intermediate_size-alone", rename_key("moe_intermediate_size", "intermediate_size")),
            ("dense-intermediate_size-beside", lambda m: m.config.update(intermediate_size=4096)),
            ("text_config", nest(*SIZES)),
            ("text_config-with-quantization", nest(*SIZES, "quantization_config")),
            ("text_config-null", lambda m: m.config.update(text_config=None)),
        )
    },
}  # fmt: skip


@pytest.mark.parametrize("name", SPELLINGS)
def test_a_spelling_of_config_json_gives_the_same_banks_and_keeps_the_file(name: str, tmp_path: Path) -> None:
    make, edit = SPELLINGS[name]
    made = make()
    made.config["a float"], made.config["é"] = 1e-06, [None, {"z": 1, "a": 2}]
    edit(made)
    expected = copy.deepcopy(made.config)
    document = assert_same_banks(made, make(), tmp_path)
    assert telling(document) == []
    holder = expected if "quantization_config" in expected else expected["text_config"]
    holder["quantization_config"]["sm70_prepared"] = MARKER
    assert pairs(tmp_path / "made/out/config.json") == ordered(expected)


@pytest.mark.parametrize("name", FORMATS)
def test_sizes_in_text_config_win_over_those_beside_it(name: str, tmp_path: Path) -> None:
    made = FORMATS[name]()
    nest(*SIZES)(made)
    made.config["hidden_size"], made.config["num_hidden_layers"] = 4096, 99
    assert_same_banks(made, FORMATS[name](), tmp_path)


@pytest.mark.parametrize(
    ("key", "message", "code"),
    [
        ("num_experts", "num_experts is missing, or no whole number in range", 4),
        ("hidden_size", "hidden_size is missing, or no whole number in range", 3),
        ("moe_intermediate_size", "moe_intermediate_size is missing, or no whole number in range", 3),
        ("num_experts_per_tok", "num_experts_per_tok is missing, or no whole number in range", 3),
        ("num_hidden_layers", "num_hidden_layers is missing, or no whole number in range", 3),
    ],
)
@pytest.mark.parametrize("value", [None, 0, -4, True, "4", 4.0, 1 << 40])
def test_a_size_that_is_missing_or_no_number_is_refused(
    key: str, message: str, code: int, value: object, tmp_path: Path
) -> None:
    made = awq()
    made.config[key] = value
    assert refuse(made, tmp_path, code) == [f"config.json: {message}"]


CONTRADICTIONS = [
    (awq, lambda m: m.config.update(num_local_experts=8), "num_experts", "num_local_experts", "4", "8"),
    (nvfp4, lambda m: m.config.update(n_routed_experts="4"), "num_experts", "n_routed_experts", "4", "'4'"),
    (awq, lambda m: m.config.update(moe_topk=3), "num_experts_per_tok", "moe_topk", "2", "3"),
    (awq, lambda m: m.quantization.update(w_bit=8), "bits", "w_bit", "4", "8"),
    (awq, lambda m: m.quantization.update(q_group_size=64), "group_size", "q_group_size", "32", "64"),
]  # fmt: skip


@pytest.mark.parametrize("nested", [False, True], ids=["flat", "text_config"])
@pytest.mark.parametrize(
    ("make", "edit", "first", "other", "one", "two"), CONTRADICTIONS, ids=[c[3] for c in CONTRADICTIONS]
)
def test_two_spellings_of_a_number_that_differ_are_refused(
    make: Callable[..., Made], edit: Edit, first: str, other: str, one: str, two: str, nested: bool, tmp_path: Path
) -> None:
    made = make()
    edit(made)
    if nested:
        nest(*SIZES, *{other} & made.config.keys())(made)
    source, out = made.write(tmp_path / "source"), tmp_path / "out"
    result = CliRunner().invoke(main, [str(source), "--out", str(out)])
    assert result.exit_code == 3
    assert result.stderr == (
        f"error: config.json: {first} and {other} contradict each other: expected {other} {one}, found {two}\n"
        "next: mend config.json after the model's own\n"
    )
    assert not out.exists()


@pytest.mark.parametrize(
    "edit",
    [
        lambda m: m.config.update(num_local_experts=4, n_routed_experts=None),
        lambda m: m.quantization.update(w_bit=4, q_group_size=32),
    ],
    ids=["experts", "quantization"],
)
def test_two_spellings_of_a_number_that_agree_are_fine(edit: Edit, tmp_path: Path) -> None:
    made = awq()
    edit(made)
    assert_same_banks(made, awq(), tmp_path)


@pytest.mark.parametrize("top_k", [4, 5])
def test_no_more_experts_are_asked_for_a_token_than_there_are(top_k: int, tmp_path: Path) -> None:
    made = awq()
    made.config["num_experts_per_tok"] = top_k
    if top_k == 4:
        seal(made, tmp_path)
    else:
        message = "num_experts_per_tok is more than there are experts"
        assert refuse(made, tmp_path, 3) == [f"config.json: {message}"]


@pytest.mark.parametrize("flat", [16, 32])
def test_both_places_of_an_nvfp4_group_size_must_be_right(flat: int, tmp_path: Path) -> None:
    made = nvfp4()
    made.quantization["group_size"] = flat
    made.quantization["config_groups"]["group_0"]["weights"]["group_size"] = 48 - flat
    assert refuse(made, tmp_path, 3) == ["config.json: NVFP4 has one scale for 16 values"]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"[]", "not a JSON object"),
        (b'{"a": 1, "a": 2}', "not valid JSON: duplicate key 'a'"),
        (b'{"a": ' + b"[" * 100_000, "not valid JSON: nested too deeply"),
        (b"\xff\xfe", "not valid JSON"),
    ],
    ids=["empty", "cut", "list", "duplicate", "deep", "binary"],
)
@pytest.mark.parametrize("file", ["config.json", INDEX, "hf_quant_config.json"])
def test_json_that_is_none_is_refused_by_file_name(file: str, data: bytes, message: str, tmp_path: Path) -> None:
    made = awq()
    if file == "hf_quant_config.json":
        del made.config["quantization_config"]
    source = made.write(tmp_path / "source")
    (source / file).write_bytes(data)
    result = run(source, tmp_path / "out")
    assert result.exit_code == 3
    (problem,) = json.loads(result.stdout)["error"]["problems"]
    assert problem["file"] == file
    assert problem["message"].startswith(message)


# The file beside config.json.
def moved(make: Callable[..., Made], file: str, *, drop: str | None = None, **fields: object) -> Made:
    """A checkpoint whose quantization_config lies in `file`, as `fields` if given."""
    made = make()
    document = dict(made.config.pop("quantization_config"))
    document.pop(drop, None)
    made.others[file] = json.dumps(fields or document).encode()
    return made


@pytest.mark.parametrize(
    ("make", "file", "fields", "method"),
    [
        (awq, "quant_config.json", {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}, "awq"),
        (awq, "quantize_config.json",
         {"bits": 4, "group_size": 32, "quant_method": "awq", "zero_point": True, "checkpoint_format": "gemm"}, "awq"),
        (nvfp4, "hf_quant_config.json",
         {"producer": {"name": "modelopt", "version": "0.30"},
          "quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16,
                           "exclude_modules": ["lm_head", "model.layers.0.mlp.gate"]}}, "modelopt"),
        (nvfp4, "hf_quant_config.json", {"quantization": {"quant_algo": "nvfp4"}}, "modelopt"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("null", [False, True], ids=["absent", "null"])
@pytest.mark.parametrize("nested", [False, True], ids=["flat", "text_config"])
def test_quantization_from_the_file_beside_config_json_goes_into_the_new_config_json(
    make: Callable[..., Made],
    file: str,
    fields: dict[str, Any],
    method: str,
    null: bool,
    nested: bool,
    tmp_path: Path,
) -> None:
    made = moved(make, file, **fields)
    if null:
        made.config["quantization_config"] = None
    if nested:
        nest(*SIZES)(made)
    assert_same_banks(made, make(), tmp_path)
    made_from = {"quant_method": method, **fields, "sm70_prepared": MARKER}
    expected = {**made.config, "quantization_config": made_from}
    assert pairs(tmp_path / "made/out/config.json") == ordered(expected)
    assert (tmp_path / "made/out" / file).read_bytes() == made.others[file]


def test_config_json_counts_before_the_files_beside_it(tmp_path: Path) -> None:
    made = awq()
    made.others["hf_quant_config.json"] = b'{"quantization": {"quant_algo": "FP8"}}'
    made.others["quant_config.json"] = b"never parsed"
    assert_same_banks(made, awq(), tmp_path)


def test_a_gptq_file_beside_config_json_is_not_supported(tmp_path: Path) -> None:
    made = moved(awq, "quantize_config.json", drop="quant_method")
    assert refuse(made, tmp_path, 4) == ["config.json: quant_method 'gptq' is not supported"]


# MIXED_PRECISION.
FP8, FP4 = {"quant_algo": "FP8"}, {"quant_algo": "NVFP4", "group_size": 16}


def mixed(layers: dict[str, object], *, nested: bool) -> Edit:
    def edit(made: Made) -> None:
        fields = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
        old = made.config["quantization_config"]
        made.config["quantization_config"] = {
            "quant_method": "modelopt",
            **({"quantization": fields} if nested else {**fields, "ignore": old["ignore"]}),
        }

    return edit


@pytest.mark.parametrize("nested", [False, True], ids=["flat", "nested"])
@pytest.mark.parametrize(
    "layers",
    [
        {EXPERTS: FP4},
        {f"{EXPERTS}.{e}.{p}_proj": FP4 for e in range(4) for p in PROJECTIONS},
        {"model.layers.0.self_attn.q_proj": FP8, EXPERTS: FP4, "model.layers.0.mlp.shared_expert.up_proj": FP8},
        {EXPERTS: {"quant_algo": "w4a16_nvfp4"}},
        {"model.layers.*.mlp.experts": FP4},
        # Not about these experts, however alike.
        {
            EXPERTS: FP4,
            "model.layers.0.mlp.experts_too": FP8,
            "model.layers.00.mlp.experts": FP8,
            "mtp.layers.0.mlp.experts": FP8,
        },
    ],
    ids=["experts", "projections", "beside-fp8", "w4a16", "glob", "near-misses"],
)
def test_mixed_precision_with_nvfp4_experts_is_converted(
    layers: dict[str, object], nested: bool, tmp_path: Path
) -> None:
    made = nvfp4()
    mixed(layers, nested=nested)(made)
    assert_same_banks(made, nvfp4(), tmp_path)


@pytest.mark.parametrize("nested", [False, True], ids=["flat", "nested"])
@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ({EXPERTS: FP8}, f"ModelOpt algorithm 'FP8' of {EXPERTS} is not supported"),
        ({f"{EXPERTS}.0.gate_proj": FP4, f"{EXPERTS}.1.gate_proj": FP8},
         f"ModelOpt algorithm 'FP8' of {EXPERTS}.1.gate_proj is not supported"),
        ({"model.layers.*.mlp.experts": FP8}, "ModelOpt algorithm 'FP8' of model.layers.*.mlp.experts is not supported"),
        ({EXPERTS: {}}, f"ModelOpt algorithm 'none' of {EXPERTS} is not supported"),
    ],
)  # fmt: skip
def test_mixed_precision_with_other_experts_is_not_supported(
    layers: dict[str, object], message: str, nested: bool, tmp_path: Path
) -> None:
    made = nvfp4()
    mixed(layers, nested=nested)(made)
    assert refuse(made, tmp_path, 4) == [f"config.json: {message}"]


def test_mixed_precision_with_another_group_size_is_refused(tmp_path: Path) -> None:
    made = nvfp4()
    mixed({EXPERTS: {"quant_algo": "NVFP4", "group_size": 32}}, nested=False)(made)
    assert refuse(made, tmp_path, 3) == ["config.json: NVFP4 has one scale for 16 values"]


# Exclude lists.
SECOND = "model.layers.1.mlp.experts"


def with_exclude(format_name: str, excluded: list[str] | None, *, plain: bool) -> Made:
    """Two layers, of which the second has bf16 experts if `plain`."""
    made = FORMATS[format_name](layers=2)
    key = "modules_to_not_convert" if format_name == "awq" else "ignore"
    if excluded is None:
        del made.quantization[key]
    else:
        made.quantization[key] = excluded
    if plain:
        for expert in range(4):
            for projection in PROJECTIONS:
                made.unquantise(f"{SECOND}.{expert}.{projection}_proj")
    return made


EXCLUDING = [
    ("awq", [SECOND]),
    ("awq", ["layers.1.mlp"]),
    ("awq", ["mlp.gate", "layers.1."]),
    ("nvfp4", [SECOND]),
    ("nvfp4", ["model.layers.1"]),
    ("nvfp4", ["lm_head", "model.layers.1.mlp*"]),
    ("nvfp4", ["*.1.mlp.experts"]),
    ("nvfp4", ["model.layers.[1-3].mlp.experts"]),
]
# Globs and substrings belong to one format each; a name has to end at a dot.
NOT_EXCLUDING: list[tuple[str, list[str] | None]] = [
    ("awq", None),
    ("awq", []),
    ("awq", ["mlp.gate", "lm_head", "self_attn"]),
    ("awq", [""]),
    ("awq", ["layers.2", "model.layers.1.mlp*"]),
    ("nvfp4", None),
    ("nvfp4", []),
    ("nvfp4", ["lm_head", "model.layers.1.mlp.gate"]),
    ("nvfp4", ["layers.1.mlp"]),
    ("nvfp4", ["model.layers.1.mlp.exp"]),
    ("nvfp4", ["model.layers.1?.mlp*"]),
]


@pytest.mark.parametrize(("format_name", "excluded"), EXCLUDING)
def test_an_excluded_layer_of_bf16_experts_passes_through(
    format_name: str, excluded: list[str], tmp_path: Path
) -> None:
    made = with_exclude(format_name, excluded, plain=True)
    document = seal(made, tmp_path)
    assert telling(document) == [
        {"message": "layer is not quantised and passes through", "example": SECOND, "count": 1, "layer": 1}
    ]
    assert list(banks(tmp_path)) == ["rank0/layer-00000.safetensors"]
    assert passed_through(tmp_path) == {name for name in made.tensors if not name.startswith(f"{EXPERTS}.")}


@pytest.mark.parametrize(("format_name", "excluded"), EXCLUDING)
def test_an_excluded_layer_of_quantised_experts_is_refused(
    format_name: str, excluded: list[str], tmp_path: Path
) -> None:
    made = with_exclude(format_name, excluded, plain=False)
    first = f"{SECOND}.0.gate_proj.{'qweight' if format_name == 'awq' else 'weight'}"
    what = "is quantised, but the exclude list of quantization_config says that its layer is not"
    assert refuse(made, tmp_path, 3) == [f"{first}: {what}"]


@pytest.mark.parametrize(("format_name", "excluded"), NOT_EXCLUDING)
def test_a_bf16_layer_that_is_not_excluded_is_refused_and_a_quantised_one_converted(
    format_name: str, excluded: list[str] | None, tmp_path: Path
) -> None:
    made = with_exclude(format_name, excluded, plain=True)
    what = f"is not quantised (BF16), but quantization_config says {format_name} and does not exclude its layer"
    assert refuse(made, tmp_path / "bf16", 3) == [f"{SECOND}.0.gate_proj.weight: {what}"]
    made = with_exclude(format_name, excluded, plain=False)
    assert_same_banks(made, FORMATS[format_name](layers=2), tmp_path)


@pytest.mark.parametrize("value", ["mlp.gate", 5, {"mlp.gate": 1}], ids=["text", "number", "object"])
@pytest.mark.parametrize("format_name", FORMATS)
def test_an_exclude_list_that_is_no_list_is_refused(format_name: str, value: object, tmp_path: Path) -> None:
    made = FORMATS[format_name]()
    key = "modules_to_not_convert" if format_name == "awq" else "ignore"
    made.quantization[key] = value
    (problem,) = refuse(made, tmp_path, 3)
    assert problem.startswith("config.json: ")
    assert key in problem


def test_an_exclude_list_in_the_nested_spelling_counts(tmp_path: Path) -> None:
    made = with_exclude("nvfp4", [], plain=True)
    made.config["quantization_config"] = {
        "quant_method": "modelopt",
        "quantization": {"quant_algo": "NVFP4", "exclude_modules": ["model.layers.1.mlp.experts*"]},
    }
    seal(made, tmp_path)
    assert list(banks(tmp_path)) == ["rank0/layer-00000.safetensors"]


# What is no expert passes through.
def around(format_name: str) -> Made:
    """Three decoder layers, the first dense; shared experts, draft layers and quantised attention."""
    make = FORMATS[format_name]
    group_size = 32 if format_name == "awq" else None
    made = make(layers=3)
    for expert in range(4):
        made.drop_expert(expert, layer=0)
    made.drop("model.layers.0.mlp.gate.weight")
    for prefix in (
        "model.layers.0.mlp.",
        "model.layers.1.mlp.shared_expert.",
        "model.layers.2.mlp.shared_experts.",
        "model.layers.3.mlp.experts.0.",  # beyond num_hidden_layers
        "model.layers.3.mlp.experts.9.",
        "mtp.layers.0.mlp.experts.0.",
        "model.mtp.layers.0.mlp.experts.0.",
        "model.visual.blocks.0.mlp.experts.0.",
        "encoder.layers.1.mlp.experts.0.",
    ):
        for name, new in expert_tensors(prefix, 64, 64, group_size).items():
            made.add(name, new)
    made.add("model.layers.1.mlp.gate.e_score_correction_bias", tensor("F32", (4,)))
    made.add("model.layers.1.mlp.shared_expert_gate.weight", tensor("BF16", (1, 64)))
    made.add("model.layers.3.eh_proj.weight", tensor("BF16", (64, 128)))
    return made


@pytest.mark.parametrize("format_name", FORMATS)
def test_dense_layers_shared_experts_routers_and_draft_layers_pass_through(format_name: str, tmp_path: Path) -> None:
    made = around(format_name)
    (finding,) = telling(seal(made, tmp_path / "made"))
    assert finding["message"] == "expert tensors of layers beyond num_hidden_layers pass through"
    assert finding["example"].startswith("model.layers.3.mlp.experts.0.")
    experts = ("model.layers.1.mlp.experts.", "model.layers.2.mlp.experts.")
    assert passed_through(tmp_path / "made") == {name for name in made.tensors if not name.startswith(experts)}
    seal(FORMATS[format_name](layers=3), tmp_path / "plain")
    plain = banks(tmp_path / "plain")
    del plain["rank0/layer-00000.safetensors"]
    assert banks(tmp_path / "made") == plain


# Names.
NAMES = {
    "w1-w2-w3": {".gate_proj.": ".w1.", ".up_proj.": ".w3.", ".down_proj.": ".w2."},
    "block_sparse_moe": {".mlp.": ".block_sparse_moe."},
    "mixtral": {".mlp.": ".block_sparse_moe.", ".gate_proj.": ".w1.", ".up_proj.": ".w3.", ".down_proj.": ".w2."},
    "index-after-projection": {f".{e}.{p}_proj.": f".{p}_proj.{e}." for e in range(4) for p in PROJECTIONS},
    "model.language_model": {"model.": "model.language_model."},
    "language_model.model": {"model.": "language_model.model."},
    "repeated": {"model.": "model.language_model.model.language_model."},
    "doubled": {"model.": "model.model."},
}


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("name", NAMES)
def test_other_names_give_the_same_banks_and_pass_through_as_they_are(
    name: str, format_name: str, tmp_path: Path
) -> None:
    make = FORMATS[format_name]
    made = make(shards=2)
    for old, new in NAMES[name].items():
        made.rename(old, new)
    rest = {n for n in made.tensors if ".experts." not in n}
    assert len(rest) == 4
    assert_same_banks(made, make(shards=2), tmp_path)
    assert passed_through(tmp_path / "made") == rest


def test_experts_of_one_layer_named_in_two_ways_are_refused(tmp_path: Path) -> None:
    made = awq()
    made.rename(f"{EXPERTS}.2.gate_proj.scales", f"{EXPERTS}.2.w1.scales")
    problems = refuse(made, tmp_path, 3)
    assert problems == [f"{EXPERTS}.2.w1.scales: is named unlike {EXPERTS}.0.gate_proj.scales"]


def test_one_tensor_under_two_names_is_refused(tmp_path: Path) -> None:
    made = awq()
    made.add(f"{EXPERTS}.2.w1.scales", made.tensors[f"{EXPERTS}.2.gate_proj.scales"])
    problems = refuse(made, tmp_path, 3)
    assert problems[0] == f"{EXPERTS}.2.w1.scales: is the same tensor as {EXPERTS}.2.gate_proj.scales"


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize(
    "name", ["gate_projection.qweight", "0.gate.weight", "00.gate_proj.qweight", "x.gate_proj.qweight", "0.gate_proj"]
)
def test_a_name_inside_the_experts_that_is_not_understood_is_not_supported(
    name: str, format_name: str, tmp_path: Path
) -> None:
    made = FORMATS[format_name]()
    made.add(f"{EXPERTS}.{name}", tensor("I32", (8,)))
    assert refuse(made, tmp_path, 4) == [f"{EXPERTS}.{name}: lies in the experts, but its name is not understood"]


# All experts in 3-D tensors.
STYLES = {
    "underscore": {part: "" if part == "weight" else f"_{part}" for part in PARTS},
    "dot": {part: f".{part}" for part in PARTS},
    "short": {"weight": "", "weight_scale": "_scale", "weight_scale_2": "_scale_2", "input_scale": "_input_scale"},
    "no-input-scale": {"weight": "", "weight_scale": "_weight_scale", "weight_scale_2": "_weight_scale_2"},
}


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("globals_shape", ["[E]", "[E, 1]", "[E, 2]"])
@pytest.mark.parametrize("style", STYLES)
def test_fused_experts_give_the_banks_of_the_unfused_ones(
    style: str, globals_shape: str, shards: int, tmp_path: Path
) -> None:
    made, plain = nvfp4(layers=2), nvfp4(layers=2)
    if globals_shape == "[E, 2]":  # room for one of gate and one of up
        for both_forms in (made, plain):
            for expert in range(4):
                both_forms.change(f"{EXPERTS}.{expert}.up_proj.weight_scale_2", data=f32(7e-4 + expert * 1e-4))
    fuse(made, STYLES[style], globals_shape=globals_shape)
    if shards == 2:  # scales apart from their weights
        (tensors,) = made.shards.values()
        made.shards["scales.safetensors"] = {n: tensors.pop(n) for n in list(tensors) if "_scale" in n}
        made.index = True
    assert_same_banks(made, plain, tmp_path)
    assert passed_through(tmp_path / "made") == {name for name in plain.tensors if ".experts." not in name}
    assert len(banks(tmp_path / "made")) == 2
    verified = CliRunner().invoke(
        main, ["verify", str(tmp_path / "made/out"), "--source", str(tmp_path / "made/source")]
    )
    assert verified.exit_code == 0, verified.stderr
    manifest = json.loads((tmp_path / "made/out/sm70/manifest.json").read_bytes())
    dropped = {d["name"]: d["experts"] for d in manifest["dropped"]}
    inputs = STYLES[style].get("input_scale")
    assert dropped == {
        f"model.layers.{layer}.mlp.experts.{name}{inputs}": "0-3"
        for layer in range(2)
        for name in ("gate_up_proj", "down_proj")
        if inputs
    }


@pytest.mark.parametrize(
    ("shape", "what"),
    [
        ((), "is one global scale for all experts"),
        ((1,), "is one global scale for all experts"),
        ((3,), "is one global scale for all experts"),
    ],
)
def test_fused_experts_with_one_global_are_not_supported(shape: tuple[int, ...], what: str, tmp_path: Path) -> None:
    made = nvfp4()
    fuse(made, STYLES["short"])
    made.change(f"{EXPERTS}.gate_up_proj_scale_2", shape=shape)
    assert refuse(made, tmp_path, 4) == [f"{EXPERTS}.gate_up_proj_scale_2: {what}"]


@pytest.mark.parametrize("shape", [(3, 128, 32), (4, 128 * 32), (4, 127, 32), (5, 128, 32)])
def test_fused_experts_of_another_form_are_not_supported(shape: tuple[int, ...], tmp_path: Path) -> None:
    made = nvfp4()
    fuse(made, STYLES["dot"])
    made.change(f"{EXPERTS}.gate_up_proj.weight", shape=shape)
    what = "holds all experts in a form that is not supported"
    assert refuse(made, tmp_path, 4) == [f"{EXPERTS}.gate_up_proj.weight: {what}"]


def test_fused_awq_experts_are_not_supported(tmp_path: Path) -> None:
    made = awq()
    for expert in range(4):
        made.drop_expert(expert)
    made.add(f"{EXPERTS}.gate_up_proj.qweight", tensor("I32", (4, 64, 16)))
    what = "holds all experts in a form that is not supported"
    assert refuse(made, tmp_path, 4) == [f"{EXPERTS}.gate_up_proj.qweight: {what}"]


@pytest.mark.parametrize("excluded", [True, False])
def test_fused_bf16_experts_pass_through_if_they_are_excluded(excluded: bool, tmp_path: Path) -> None:
    made = nvfp4(layers=2)
    for expert in range(4):
        made.drop_expert(expert, layer=1)
    made.add(f"{SECOND}.gate_up_proj", tensor("BF16", (4, 128, 64), bf16([0.5])))
    made.add(f"{SECOND}.down_proj", tensor("BF16", (4, 64, 64), bf16([0.5])))
    if excluded:
        made.quantization["ignore"].append(SECOND)
        seal(made, tmp_path)
        assert {f"{SECOND}.gate_up_proj", f"{SECOND}.down_proj"} <= passed_through(tmp_path)
    else:
        what = "is not quantised (BF16), but quantization_config says nvfp4 and does not exclude its layer"
        assert refuse(made, tmp_path, 3) == [f"{SECOND}.gate_up_proj: {what}"]


# NVIDIA's FP4-Local coding of block scales.
@pytest.mark.parametrize("form", ["one", "fused"])
def test_fp4_local_is_not_supported(form: str, tmp_path: Path) -> None:
    made = nvfp4(experts=2)
    module = f"{EXPERTS}.0.gate_proj" if form == "one" else f"{EXPERTS}.gate_up_proj"
    if form == "fused":
        fuse(made, STYLES["dot"])
    made.drop(f"{module}.weight_scale")
    made.add(f"{module}.weight_scale.nvfp4_csf_fixed", tensor("U8", (64,)))
    made.add(f"{module}.weight_scale.nvfp4_csf_exceptions", tensor("U8", (8,)))
    what = "holds block scales in NVIDIA's FP4-Local coding, which is not decoded here"
    assert refuse(made, tmp_path, 4) == [
        f"{module}.weight_scale.nvfp4_csf_fixed: {what}",
        f"{module}.weight_scale.nvfp4_csf_exceptions: {what}",
    ]


def test_a_refusal_of_one_file_names_it(tmp_path: Path) -> None:
    made = nvfp4()
    fuse(made, STYLES["short"])
    made.change(f"{EXPERTS}.down_proj_scale_2", shape=())
    result = CliRunner().invoke(main, [str(made.write(tmp_path / "source")), "--out", str(tmp_path / "out")])
    assert f"error: {EXPERTS}.down_proj_scale_2 ({SINGLE}): " in result.stderr
