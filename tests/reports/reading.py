"""Reports as a browser and a terminal have them."""

from __future__ import annotations

import io
from html.parser import HTMLParser
from typing import Literal

from rich.console import Console

from elastictrain.reports.facts import Report
from elastictrain.reports.terminal import show

VOID = {"meta", "br", "hr", "img", "input", "link"}


class Document(HTMLParser):
    """Elements that are opened and closed in order, as a browser must not have to guess."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def of_class(self, name: str) -> list[dict[str, str | None]]:
        return [attrs for _, attrs in self.found if name in (attrs.get("class") or "").split()]


class Terminal(Console):
    """One that shows every letter, whatever the tests' own output can."""

    encoding = "utf-8"  # type: ignore[assignment]


def printed(report: Report, *, width: int | None = None, has_colors: bool = False) -> str:
    """``width``: of a terminal; None: there is none."""
    stream = io.StringIO()
    colors: Literal["truecolor"] | None = "truecolor" if has_colors else None
    if width is None:
        show(report, console=Console(file=stream))
    else:
        show(report, console=Terminal(file=stream, force_terminal=True, color_system=colors, width=width))
    return stream.getvalue()
