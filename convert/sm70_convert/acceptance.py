"""env --acceptance: the shell script by which a V100 owner proves a prepared folder in one go."""

from importlib.resources import files


def acceptance_script() -> str:
    """The script's text; it lies beside this module."""
    return (files("sm70_convert") / "acceptance.sh").read_text(encoding="utf-8")
