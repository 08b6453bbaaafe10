"""What is legal but telling: each finding made by code, its exact text, count and example, the same however it came about."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from made import EXPERTS, LEFT_OUT, Made, awq, f16, f32, nvfp4
from sm70_convert.checkpoint import open_checkpoint
from sm70_convert.cli import main
from sm70_convert.experts import ExpertReader
from sm70_convert.layer_findings import LayerFindings
from sm70_convert.plan import Options, build_plan

FAR_LARGER = "largest scale is over 64 times the median of its layer's experts"
HALFWAY = 2.0**-14 - 2.0**-25  # between the largest subnormal fp16 and the smallest normal one, to which it rounds
TINY = "all scales are zero or subnormal in fp16"
Edit = Callable[[Made], object]


def run(*arguments: object) -> str:
    result = CliRunner().invoke(main, [str(a) for a in arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def found(manifest: Any) -> list[tuple[int | None, str, int, str]]:
    """(layer, message, count, example) of all findings but that of layers with input_scale."""
    findings = [(f["layer"], f["message"], f["count"], f["example"]) for f in manifest["findings"]]
    return [f for f in findings if f[1] != LEFT_OUT]


def manifest(out: Path) -> Any:
    return json.loads((out / "sm70/manifest.json").read_bytes())


def codes(projection: str, experts: tuple[int, ...], value: int) -> Edit:
    """One block scale code everywhere in a projection of some experts."""
    return lambda m: [m.change(f"{EXPERTS}.{e}.{projection}_proj.weight_scale", data=bytes([value])) for e in experts]


def factor(projection: str, value: float, *experts: int, layer: int = 0) -> Edit:
    names = [f"model.layers.{layer}.mlp.experts.{e}.{projection}_proj.weight_scale_2" for e in experts]
    return lambda m: [m.change(name, data=f32(value)) for name in names]


def factors(value: float, *experts: int) -> Edit:
    """One global for gate and up."""
    return lambda m: [factor(p, value, *experts)(m) for p in ("gate", "up")]


def scale(projection: str, value: float, *experts: int, position: int | None = None) -> Edit:
    """One AWQ scale everywhere in a projection of some experts, or at one position."""

    def edit(made: Made) -> None:
        for expert in experts:
            name = f"{EXPERTS}.{expert}.{projection}_proj.scales"
            if position is None:
                made.change(name, data=f16(value))
            else:
                made.set_item(name, position, f16(value))

    return edit


def scales(projection: str, *values: float) -> Edit:
    """One AWQ scale for each expert."""
    return all_of(*(scale(projection, value, expert) for expert, value in enumerate(values)))


def all_of(*edits: Edit) -> Edit:
    return lambda m: [edit(m) for edit in edits]


def name(expert: int, projection: str, part: str) -> str:
    return f"{EXPERTS}.{expert}.{projection}_proj.{part}"


FOUND: dict[str, tuple[Callable[..., Made], Edit, list[tuple[str, int, str]]]] = {
    "nothing-nvfp4": (nvfp4, lambda _: None, []),
    "nothing-awq": (awq, lambda _: None, []),
    "zero-blocks": (nvfp4, all_of(codes("down", (3, 1), 0), codes("gate", (2,), 0x80)),
        [("all block scales are zero", 3, name(1, "down", "weight_scale"))]),
    "negative-blocks": (nvfp4, lambda m: m.set_item(name(2, "up", "weight_scale"), 7, b"\xb8"),
        [("some block scales are negative", 1, name(2, "up", "weight_scale"))]),
    "zero-global": (nvfp4, all_of(factors(0.0, 1), factor("down", -0.0, 3)),
        [("global scale is zero", 3, name(1, "gate", "weight_scale_2"))]),
    "subnormal-globals-of-other-values": (nvfp4, all_of(factor("down", 1e-40, 3), factor("down", 2e-40, 1)),
        [("global scale is subnormal", 2, name(1, "down", "weight_scale_2"))]),
    "smallest-normal-global": (nvfp4, factors(2.0**-126, 0),
        [(TINY, 2, name(0, "gate", "weight_scale_2"))]),
    "negative-global": (nvfp4, factor("down", -3e-4, 2, 3),
        [("global scale is negative", 2, name(2, "down", "weight_scale_2"))]),
    "negative-subnormal-global": (nvfp4, factor("down", -1e-40, 0),
        [("global scale is negative", 1, name(0, "down", "weight_scale_2")),
         ("global scale is subnormal", 1, name(0, "down", "weight_scale_2"))]),
    # The largest product just rounds to a subnormal fp16, or to the smallest normal one.
    "products-just-subnormal": (nvfp4, all_of(codes("down", (1,), 0x7E), factor("down", HALFWAY / 448 * (1 - 2.0**-20), 1)),
        [(TINY, 1, name(1, "down", "weight_scale_2"))]),
    "products-just-normal": (nvfp4, all_of(codes("down", (1,), 0x7E), factor("down", HALFWAY / 448 * (1 + 2.0**-20), 1)), []),
    "unlike-globals": (nvfp4, all_of(factor("up", 3e-4, 0, 2), factor("gate", 3.1e-4, 0, 2)),
        [("gate and up have different global scales", 2, name(0, "gate", "weight_scale_2"))]),
    "zero-scales": (awq, all_of(scale("down", 0, 2), scale("gate", -0.0, 3)),
        [("all scales are zero", 2, name(2, "down", "scales"))]),
    "negative-scale": (awq, all_of(scale("down", -0.01, 1, position=5), scale("up", -0.0, 0, position=0)),
        [("some scales are negative", 1, name(1, "down", "scales"))]),
    "subnormal-scales": (awq, all_of(scale("down", 2.0**-14 - 2.0**-24, 1), scale("down", 2.0**-14, 2)),
        [(TINY, 1, name(1, "down", "scales"))]),
    # The median of four is the upper middle one, and 64 times that is not yet over it.
    "far-larger": (awq, all_of(scales("down", 0.5, 1, 2, 128), scale("up", 30, 0, position=3)),
        [(FAR_LARGER, 1, name(0, "up", "scales"))]),
    "far-larger-by-a-bit": (awq, scales("down", 128.125, 0.5, 2, 1),
        [(FAR_LARGER, 1, name(0, "down", "scales"))]),
    "far-larger-than-half": (awq, scales("down", 100, 1, 100, 1), []),
    "far-larger-in-two-projections": (awq, all_of(scales("down", 1, 1, 1, 65), scales("gate", 1, 65, 1, 1)),
        [(FAR_LARGER, 2, name(1, "gate", "scales"))]),
    "far-larger-than-nothing": (awq, scales("down", 100, 0, 0, 0),
        [("all scales are zero", 3, name(1, "down", "scales"))]),
    "far-larger-than-those-not-zero": (awq, scales("down", 100, 0, 1, 1),
        [("all scales are zero", 1, name(1, "down", "scales")), (FAR_LARGER, 1, name(0, "down", "scales"))]),
    "far-larger-negative": (awq, scale("down", -50, 3, position=1),
        [(FAR_LARGER, 1, name(3, "down", "scales")), ("some scales are negative", 1, name(3, "down", "scales"))]),
    "far-larger-global": (nvfp4, factor("down", 0.5, 3),
        [(FAR_LARGER, 1, name(3, "down", "weight_scale"))]),
}  # fmt: skip


@pytest.mark.parametrize("case", FOUND)
def test_what_is_found(case: str, tmp_path: Path) -> None:
    make, edit, expected = FOUND[case]
    made, out = make(), tmp_path / "out"
    edit(made)
    source = made.write(tmp_path / "source")
    run(source, "--out", out)
    assert found(manifest(out)) == [(0, *finding) for finding in expected]
    assert json.loads(run("inspect", out, "--json"))["findings"] == manifest(out)["findings"]
    # Reading the scales alone comes to the same.
    assert (
        json.loads(run("plan", source, "--tp-size", 1, "--scales", "--json"))["findings"] == manifest(out)["findings"]
    )


def test_bf16_scales_are_judged_as_the_fp16_that_they_become(tmp_path: Path) -> None:
    made = awq()
    tiny = (np.full(1, 1e-6, np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()
    for expert in range(4):
        for projection in ("gate", "up", "down"):
            made.change(name(expert, projection, "scales"), dtype="BF16", data=tiny)
    run(made.write(tmp_path / "source"), "--out", tmp_path / "out")
    assert found(manifest(tmp_path / "out")) == [(0, TINY, 12, name(0, "gate", "scales"))]


def telling() -> Made:
    """Three layers, each with other things to find."""
    made = nvfp4(layers=3, experts=4)
    factor("up", 2e-3, 1, 2)(made)
    factor("down", 1e-40, 3, layer=1)(made)
    factor("down", 2e-40, 2, layer=1)(made)
    factor("down", 0.5, 2, layer=2)(made)
    return made


TOLD = [
    (0, "gate and up have different global scales", 2, name(1, "gate", "weight_scale_2")),
    (1, "global scale is subnormal", 2, "model.layers.1.mlp.experts.2.down_proj.weight_scale_2"),
    (2, FAR_LARGER, 1, "model.layers.2.mlp.experts.2.down_proj.weight_scale"),
]


def test_the_manifest_is_the_same_however_it_came_about(tmp_path: Path) -> None:
    source = telling().write(tmp_path / "source")

    def at_once(out: Path) -> None:
        run(source, "--out", out, "--tp-size", 1, "--tp-size", 2, "--jobs", 1)

    def by_many_workers(out: Path) -> None:
        run(source, "--out", out, "--tp-size", 1, "--tp-size", 2, "--jobs", 8)

    def in_parts(out: Path) -> None:
        for layers in ("2", "0-1"):
            run(source, "--out", out, "--tp-size", 1, "--tp-size", 2, "--layers", layers)
        run("seal", out)

    def resumed(out: Path) -> None:
        run(source, "--out", out, "--tp-size", 1, "--tp-size", 2, "--layers", "1")
        run(source, "--out", out, "--tp-size", 1, "--tp-size", 2)

    def one_size_after_the_other(out: Path) -> None:
        run(source, "--out", out, "--tp-size", 2)
        run(source, "--out", out, "--tp-size", 1)

    made = []
    for way in (at_once, by_many_workers, in_parts, resumed, one_size_after_the_other):
        way(tmp_path / way.__name__)
        made.append((tmp_path / way.__name__ / "sm70/manifest.json").read_bytes())
    assert found(json.loads(made[0])) == TOLD
    assert made == made[:1] * 5


def test_the_order_of_experts_does_not_matter(tmp_path: Path) -> None:
    with open_checkpoint(telling().write(tmp_path / "source")) as checkpoint:
        plan = build_plan(checkpoint, Options(tp_sizes=(1,)))
        for layer, told in zip(plan.layers, TOLD, strict=True):
            for order in ((0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)):
                reader, findings = ExpertReader(plan, layer), LayerFindings(plan, layer)
                for expert in order:
                    findings.check(expert, reader.read(expert))
                assert [(f.layer, f.message, f.count, f.example) for f in findings.findings()] == [told]


def test_people_see_each_kind_once_counted_over_its_layers(tmp_path: Path) -> None:
    made = telling()
    factor("up", 2e-3, 0, layer=2)(made)
    out = tmp_path / "out"
    shown = run(made.write(tmp_path / "source"), "--out", out)
    rows = [
        f"{LEFT_OUT}: 36 in layers 0-2 (such as {EXPERTS}.0.down_proj.input_scale)",
        f"gate and up have different global scales: 3 in layers 0,2 (such as {EXPERTS}.1.gate_proj.weight_scale_2)",
        "global scale is subnormal: 2 in layer 1 (such as model.layers.1.mlp.experts.2.down_proj.weight_scale_2)",
        f"{FAR_LARGER}: 1 in layer 2 (such as model.layers.2.mlp.experts.2.down_proj.weight_scale)",
    ]
    for text in (shown, run("inspect", out)):
        lines = text.splitlines()
        start = next(i for i, line in enumerate(lines) if line.startswith("findings"))
        block = [
            lines[start].removeprefix("findings").strip(),
            *(line.strip() for line in lines[start + 1 : start + 4]),
        ]
        assert sorted(block) == sorted(rows)


def test_a_prepared_folder_without_findings_says_so(tmp_path: Path) -> None:
    run(awq().write(tmp_path / "source"), "--out", tmp_path / "out")
    assert "findings     none\n" in run("inspect", tmp_path / "out")


# plan --scales


def test_every_refusal_of_scales_is_named_and_the_worst_decides_the_exit_code(tmp_path: Path) -> None:
    made = nvfp4(layers=2)
    made.set_item("model.layers.1.mlp.experts.0.up_proj.weight_scale", 3, b"\x7f")
    made.set_item(name(2, "down", "weight_scale"), 0, b"\x03")
    source = made.write(tmp_path / "source")
    arguments = ["plan", str(source), "--tp-size", "1", "--layout", "nvfp4-raw", "--scales"]

    def refused(*more: str) -> list[str]:
        result = CliRunner().invoke(main, [*arguments, *more])
        return [f"exit {result.exit_code}", *(line for line in result.stderr.splitlines() if line.startswith("error"))]

    nan = (
        "error: model.layers.1.mlp.experts.0.up_proj.weight_scale (model.safetensors): block scale code 0x7f is NaN "
        "at row 0, group 3 (1 in all)"
    )
    raw = f"error: {name(2, 'down', 'weight_scale')} (model.safetensors): nvfp4-raw would not be exact: e4m3 code 0x03"
    code, *errors = refused()
    assert code == "exit 3"
    assert [e.split(" with global")[0] for e in errors if "experts.0.up_proj" in e or "code 0x03" in e] == [nan, raw]
    assert errors[0] == nan
    code, *errors = refused("--layers", "0")
    assert code == "exit 4"
    assert raw in [e.split(" with global")[0] for e in errors]
    assert nan not in errors
