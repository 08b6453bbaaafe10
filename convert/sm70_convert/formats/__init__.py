"""Source formats: what each stores for one expert's projection, and how its config says so. One small module a format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from sm70_convert.errors import CheckpointError, Problem
from sm70_convert.layout import QuantizationSpec

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from sm70_kernels.spec import Projection


@dataclass(frozen=True, slots=True)
class Part:
    """One stored tensor of a projection: the dtypes and shapes that are right for it, likeliest first."""

    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class ScaleReport:
    """What one projection's scales showed.

    largest: the magnitude of the largest one, inf or NaN if that is not finite. notes: what is legal but telling, each with the
    part that shows it; the text holds no value, so that there are few. nonfinite: which value became inf or NaN.
    """

    largest: float
    notes: tuple[tuple[str, str], ...] = ()
    nonfinite: str | None = None


@dataclass(frozen=True)
class SourceFormat:
    """A format as functions. K is in-features, N out-features, both uncut.

    marker: the part that only quantised experts have. ignored: parts that the banks do not need.
    spec(config, experts_modules): reads quantization_config; raises CheckpointError or UnsupportedError.
    parts(K, N, group_size): the tensors of one projection.
    projection(arrays, dtypes): raw arrays and safetensors dtypes by part -> canonical words.
    check_scales(projection): what its scales show; it is called for every projection, so it takes microseconds.
    group_of(K, shape of scale_part): the group size that a shape says, or None.
    global_part: the part that holds the factor of all scales, if there is one.
    """

    name: str
    marker: str
    ignored: frozenset[str]
    spec: Callable[[Mapping[str, Any], tuple[str, ...]], QuantizationSpec]
    parts: Callable[[int, int, int], dict[str, Part]]
    projection: Callable[[Mapping[str, NDArray[Any]], Mapping[str, str]], Projection]
    check_scales: Callable[[Projection], ScaleReport]
    scale_part: str
    group_of: Callable[[int, tuple[int, ...]], int | None]
    global_part: str | None = None


def is_excluded(quantization: Mapping[str, Any], module: str) -> bool:
    """Whether the config's exclude list keeps `module` (such as model.layers.3.mlp.experts) unquantised.

    AWQ lists substrings; ModelOpt exact names of modules or of what contains them, and globs. Raises CheckpointError if the
    list is none.
    """
    if any(name and name in module for name in _exclude_list(quantization, "modules_to_not_convert")):
        return True
    nested = quantization.get("quantization")
    fields = nested if isinstance(nested, dict) else quantization
    listed = _exclude_list(quantization, "ignore") + _exclude_list(fields, "exclude_modules")
    return any(fnmatchcase(module, name.removesuffix(".*")) or module.startswith(f"{name}.") for name in listed)


def _exclude_list(fields: Mapping[str, Any], key: str) -> list[str]:
    value = fields.get(key)
    if value is None:
        return []
    if not isinstance(value, list):
        what = f"{key} of quantization_config is not a list"
        raise CheckpointError(Problem(what, file="config.json", expected="a list", actual=repr(value)[:100]))
    return [name for name in value if isinstance(name, str)]


def contradiction(fields: Mapping[str, Any], keys: tuple[str, ...]) -> Problem | None:
    """What is wrong where `fields` of config.json give one number under several of `keys`, and not the same one."""
    given = [key for key in keys if fields.get(key) is not None]
    other = next((key for key in given if fields[key] != fields[given[0]]), None)
    if other is None:
        return None
    return Problem(
        f"{given[0]} and {other} contradict each other",
        file="config.json",
        expected=f"{other} {fields[given[0]]!r}"[:100],
        actual=repr(fields[other])[:100],
        hint="mend config.json after the model's own",
    )


def source_format(name: str) -> SourceFormat:
    """The format called `awq` or `nvfp4`."""
    if name == "awq":
        from sm70_convert.formats.awq import FORMAT as AWQ_FORMAT

        return AWQ_FORMAT
    from sm70_convert.formats.modelopt_nvfp4 import FORMAT as NVFP4_FORMAT

    return NVFP4_FORMAT
