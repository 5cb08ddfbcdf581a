"""Where an instruction comes from: its debug location out of the standard library, and the calls that led there."""

from __future__ import annotations

from pathlib import Path

from shipway.simt.ir import Module, Tokens


def _attribute(tokens: Tokens, name: str) -> str | None:
    """The value of ``name: value`` in a metadata line."""
    return next((c for a, b, c in zip(tokens, tokens[1:], tokens[2:], strict=False) if (a, b) == (name, ":")), None)


def _reference(value: str | None) -> int | None:
    return int(value[1:]) if value and value[1:].isdecimal() else None


def line_of(module: Module, location: int | None) -> str | None:
    """Returns ``path:line`` of the innermost call that stands in a file here, ``None`` where there is none, and
    ``from file:line`` for each call that it was inlined into, without the file's name where it is the one before.

    The standard library's files carry relative names; those of a user are absolute.
    """
    line = last = ""
    while location is not None and (found := module.metadata.get(location)):
        path = _file(module, _reference(_attribute(found, "scope")))
        if path.startswith("/"):
            file = Path(path).name if path != last else ""
            line += f" from {file}" if line else _short(path)
            line += f":{_attribute(found, 'line')}"
            last = path
        location = _reference(_attribute(found, "inlinedAt"))
    return line or None


def _file(module: Module, scope: int | None) -> str:
    while scope is not None and (found := module.metadata.get(scope)):
        if (file := _reference(_attribute(found, "file"))) is not None:
            return (_attribute(module.metadata.get(file, []), "filename") or "").strip('"')
        scope = _reference(_attribute(found, "scope"))
    return ""


def _short(path: str) -> str:
    """The path as it is typed in the current folder, or from its ``mojo`` folder on."""
    file = Path(path)
    if file.is_relative_to(Path.cwd()):
        return str(file.relative_to(Path.cwd()))
    parts = file.parts
    return str(Path(*parts[parts.index("mojo") :])) if "mojo" in parts else path
