"""The drawings of the site as SVG, put together from boxes, lines and words."""

from __future__ import annotations

from html import escape

INK, GREY, PAPER = "#1f2933", "#7b8794", "#ffffff"
DEVICE, HOST, RING, HOT = "#d9e8fb", "#fbe9d2", "#d8f0dc", "#f9d6d5"


class Drawing:
    """Shapes on white paper, so that it reads alike under a light and a dark page."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self.parts: list[str] = []

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        text: str = "",
        fill: str = PAPER,
        dashed: bool = False,
        size: int = 14,
    ) -> None:
        """A box with its text, one line or several, in the middle."""
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="4" fill="{fill}" '
            f'stroke="{INK}" stroke-width="1.2"{dash}/>'
        )
        lines = text.split("\n") if text else []
        first = y + height / 2 - (len(lines) - 1) * size * 0.62
        for number, line in enumerate(lines):
            self.text(x + width / 2, first + number * size * 1.24, line, size=size)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        size: int = 14,
        anchor: str = "middle",
        fill: str = INK,
        bold: bool = False,
    ) -> None:
        weight = ' font-weight="600"' if bold else ""
        self.parts.append(
            f'<text x="{x}" y="{y}" font-size="{size}" text-anchor="{anchor}" fill="{fill}"'
            f'{weight} dominant-baseline="central">{escape(text)}</text>'
        )

    def arrow(self, *points: tuple[float, float], dashed: bool = False) -> None:
        """A line with a head at its end, whose last piece runs along an axis."""
        (a, b), (x, y) = points[-2:]
        dx, dy = 9 * ((x > a) - (x < a)), 9 * ((y > b) - (y < b))
        path = " ".join(f"{x},{y}" for x, y in (*points[:-1], (x - dx, y - dy)))
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self.parts.append(
            f'<polyline points="{path}" fill="none" stroke="{INK}" stroke-width="1.5"{dash}/>'
            f'<path d="M{x} {y} L{x - dx - dy / 2} {y - dy - dx / 2} '
            f'L{x - dx + dy / 2} {y - dy + dx / 2} z" fill="{INK}"/>'
        )

    def svg(self) -> str:
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'role="img" aria-label="{escape(self.title)}" font-family="system-ui, sans-serif">'
            f"<title>{escape(self.title)}</title>"
            f'<rect width="{self.width}" height="{self.height}" fill="{PAPER}"/>'
            f"{''.join(self.parts)}</svg>\n"
        )


def tiers() -> str:
    d = Drawing(900, 400, "What is on the GPU and what on the host")
    d.box(10, 40, 500, 350, fill=DEVICE)
    d.text(260, 22, "GPU", bold=True)
    d.box(600, 40, 290, 350, fill=HOST)
    d.text(745, 22, "host memory (mapped, pinned)", bold=True)
    d.box(30, 60, 210, 70, "model weights", PAPER)
    d.box(30, 150, 210, 100, "representations\na small summary of\nevery unit", PAPER)
    d.box(30, 270, 210, 100, "maps\nunit to slot, slot to unit,\neviction order", PAPER)
    d.box(
        270, 60, 220, 150, "LRU buffer\nC slots for each request\n(and kv-head) of a layer", PAPER
    )
    d.box(270, 230, 220, 70, "ring: the T newest units", RING)
    d.box(270, 320, 220, 50, "dense layers, all of their KV", PAPER, dashed=True)
    d.box(
        630,
        60,
        230,
        310,
        "host pool\n\nkeys and values of every\ntoken, of all sparse layers,\nin pages",
        PAPER,
    )
    d.arrow((630, 120), (490, 120))
    d.text(555, 104, "misses", size=13)
    d.text(555, 138, "PCIe", size=12, fill=GREY)
    d.arrow((490, 265), (630, 265))
    d.text(555, 249, "closed units", size=13)
    d.text(555, 283, "PCIe", size=12, fill=GREY)
    return d.svg()


def indices() -> str:
    d = Drawing(900, 430, "Logical ids, host ids and slot ids of one request")
    d.text(
        20,
        30,
        "logical id: place in the sequence (units of a request of 10 units, 2 in a page)",
        anchor="start",
        bold=True,
    )
    for unit in range(10):
        fill = RING if unit >= 8 else HOT if unit in (1, 4, 6) else PAPER
        d.box(20 + unit * 62, 50, 56, 40, str(unit), fill)
    d.text(660, 60, "red: selected in this step", anchor="start", size=13)
    d.text(660, 80, "green: in the ring", anchor="start", size=13)
    d.text(20, 130, "page table of the request", anchor="start", bold=True)
    for index, page in enumerate((5, 2, 7, 1, 4)):
        d.box(20 + index * 124, 145, 118, 34, f"page {page}", PAPER)
    d.text(660, 162, "one row, shared by all layers", anchor="start", size=13)
    d.text(640, 220, "dashed: written when it is full", anchor="start", size=13)
    d.text(
        20,
        220,
        "host id = page x 2 + unit in page: place in the host pool",
        anchor="start",
        bold=True,
    )
    inside = {10: 0, 11: 1, 4: 2, 5: 3, 14: 4, 15: 5, 2: 6, 3: 7, 8: 8, 9: 9}
    for host in range(16):
        unit = inside.get(host)
        fill = HOST if unit is None else HOT if unit in (1, 4, 6) else PAPER
        name = "" if unit is None else f"u{unit}"
        d.box(20 + host * 54, 250, 50, 40, name, fill, dashed=unit == 9)
        d.text(45 + host * 54, 304, str(host), size=11, fill=GREY)
    d.text(
        20,
        340,
        "slot id: place in the device buffer of the lane, C = 5 LRU slots and T = 2 of the ring",
        anchor="start",
        bold=True,
    )
    held = ("u4", "u0", "u1", "u3", "u6", "u8", "u9")
    for slot, unit in enumerate(held):
        fill = RING if slot >= 5 else HOT if unit in ("u1", "u4", "u6") else PAPER
        x = 20 + slot * 62 + (20 if slot >= 5 else 0)
        d.box(x, 365, 56, 40, unit, fill)
        d.text(x + 28, 418, str(slot), size=11, fill=GREY)
    d.text(500, 375, "The selection 1, 4, 6 and the tail unit 9", anchor="start", size=13)
    d.text(500, 395, "become the slots 2, 0, 4 and 6.", anchor="start", size=13)
    return d.svg()


def step() -> str:
    d = Drawing(900, 380, "One decode step of one layer")
    names = [
        ("append", "transfer", "new key and value\nto the ring"),
        ("update", "algorithm", "representation of\nthe open unit"),
        ("retrieve_topk", "algorithm", "which units?\nlogical ids"),
        ("plan", "transfer", "hits, victims,\nmisses"),
        ("load", "transfer", "misses from the\nhost pool"),
        ("adapt_page_table", "backend", "slots and tail\nas a table"),
        ("attend", "backend", "attention in place"),
    ]
    for number, (name, owner, what) in enumerate(names):
        row, column = divmod(number, 4)
        x, y = 20 + column * 220, 50 + row * 150
        fill = {"transfer": HOST, "algorithm": DEVICE, "backend": RING}[owner]
        d.box(x, y, 190, 90, "", fill)
        d.text(x + 95, y + 20, name, bold=True)
        for line, text in enumerate(what.split("\n")):
            d.text(x + 95, y + 48 + line * 18, text, size=13)
        if number < len(names) - 1:
            if column < 3:
                d.arrow((x + 190, y + 45), (x + 220, y + 45))
            else:
                d.arrow((x + 95, y + 90), (x + 95, y + 120), (115, y + 120), (115, y + 150))
    d.box(680, 200, 190, 90, "", HOST, dashed=True)
    d.text(775, 220, "offload", bold=True)
    d.text(775, 248, "closed units to the host,", size=13)
    d.text(775, 266, "once for all layers", size=13)
    d.arrow((650, 245), (680, 245), dashed=True)
    d.text(
        20,
        22,
        "for each layer, in one CUDA graph with all others",
        anchor="start",
        size=13,
        fill=GREY,
    )
    for number, (owner, fill) in enumerate(
        (("transfer engine", HOST), ("algorithm", DEVICE), ("backend", RING))
    ):
        d.box(20 + number * 190, 330, 26, 22, "", fill)
        d.text(54 + number * 190, 341, owner, anchor="start", size=13)
    return d.svg()


def lru() -> str:
    d = Drawing(900, 330, "How a plan moves the eviction order of a lane")
    d.text(20, 26, "before: slots by eviction order, coldest first", anchor="start", bold=True)
    before = ("u7", "u2", "u0", "u5", "u3", "u1")
    hit = ("u2", "u3")
    for place, unit in enumerate(before):
        fill = RING if unit in hit else HOT if unit in ("u7", "u0") else PAPER
        d.box(20 + place * 92, 45, 84, 46, unit, fill)
    d.text(590, 58, "selected: u3, u8, u2, u4", anchor="start", size=13)
    d.text(590, 80, "hits u2, u3; misses u8, u4", anchor="start", size=13)
    d.text(62, 106, "victim", size=12, fill=GREY)
    d.text(62 + 2 * 92, 106, "victim", size=12, fill=GREY)
    d.text(
        20,
        150,
        "the two coldest slots that were not selected take the misses, in order",
        anchor="start",
        bold=True,
    )
    d.box(20, 170, 84, 46, "u7 to u8", HOT, size=13)
    d.box(112, 170, 84, 46, "u0 to u4", HOT, size=13)
    d.arrow((330, 193), (200, 193))
    d.box(335, 170, 190, 46, "host pool: u8, u4", HOST)
    d.text(
        20,
        250,
        "after: stale, then loaded, then hits in their old order",
        anchor="start",
        bold=True,
    )
    after = (("u5", PAPER), ("u1", PAPER), ("u8", HOT), ("u4", HOT), ("u2", RING), ("u3", RING))
    for place, (unit, fill) in enumerate(after):
        d.box(20 + place * 92, 270, 84, 46, unit, fill)
    return d.svg()


def link() -> str:
    d = Drawing(900, 300, "How misses cross the link")
    d.box(10, 40, 360, 250, fill=DEVICE)
    d.text(190, 22, "GPU", bold=True)
    d.box(600, 40, 290, 250, fill=HOST)
    d.text(745, 22, "host pool", bold=True)
    for row in range(4):
        d.box(200, 60 + row * 55, 150, 40, ("slot 2", "slot 0", "slot 4", "slot 9")[row], PAPER)
    d.box(30, 60, 140, 205, "load\n\nthe programs\nshare all words\nof all misses", PAPER)
    for row in range(4):
        y = 60 + row * 55
        x = (620, 720, 650, 760)[row]
        d.box(x, y, 110, 40, f"entry {(10, 4, 15, 9)[row]}", PAPER)
        d.arrow((x, y + 20), (350, y + 20))
    d.text(486, 66, "16-byte words", size=13)
    d.text(486, 262, "PCIe, read by the kernel itself", size=12, fill=GREY)
    return d.svg()


def drawings() -> dict[str, str]:
    """SVG by file name."""
    return {f"{draw.__name__}.svg": draw() for draw in (tiers, indices, step, lru, link)}
