"""The way of tokens through a layer of experts on two ranks: a picture, drawn from what `assign` decides."""

from __future__ import annotations

import numpy as np

FILL = ("#b9d7f5", "#bfe5c3", "#ffd9a0", "#d9c9f2")
LINE = ("#2f7ed8", "#2f9e44", "#b4690e", "#7950b8")
CHOICES = ((0, 2, 0, 3, 0, 0, 1, 2), (1, 1, 3, 1, 2, 1, 1, 0))  # of the eight tokens of a row, the row of each rank
NAMES = ("abcdefgh", "ABCDEFGH")
SIDE, PITCH, TOPS = 15, 18, (78, 258)
HOME, SORTED, ARRIVED, EXPERT, LEAVING, BACK, OUT = 96, 190, 312, 415, 606, 724, 830  # left edges of the columns
THROUGH, WIDE = 468, 84  # where an expert stands


def experts_picture() -> str:
    """Choices, capacity, dispatch, experts and combine; four experts, room for 1.25 times an even share."""
    from mpitrain.comm.alone import Alone
    from mpitrain.comm.communicator import Communicator
    from mpitrain.parallel.expert.assign import Assignment, assign
    from mpitrain.routing import Routing

    routing = Routing(experts=4)
    places = routing.capacity(len(CHOICES[0]))

    def assigned(choices: tuple[int, ...]) -> Assignment:
        codes = np.array(choices)[None, :, None]
        how = {
            "lengths": None,
            "real": None,
            "positions": None,
            "axis": Communicator("cp", Alone(), (0,)),
            "training": True,
        }
        return assign(codes, routing, **how)

    went = [assigned(choices).rows.tolist() for choices in CHOICES]
    came = [
        [(r, token) for r, rows in enumerate(went) for token in rows if CHOICES[r][token] // 2 == to] for to in (0, 1)
    ]
    grouped = [sorted(rows, key=lambda row: CHOICES[row[0]][row[1]]) for rows in came]

    lines: list[str] = []
    boxes: list[str] = []

    def at(lane: int, place: int) -> float:
        return TOPS[lane] + PITCH * place

    def box(x: float, lane: int, place: int, rank: int, token: int, dropped: bool = False) -> None:
        expert, y = CHOICES[rank][token], at(lane, place)
        look = (
            f'fill="{FILL[expert]}"'
            if not dropped
            else f'fill="#ffffff" stroke="{LINE[expert]}" stroke-dasharray="3 2"'
        )
        boxes.append(f'<rect x="{x}" y="{y:g}" width="{SIDE}" height="{SIDE}" rx="2" {look}/>')
        boxes.append(_text(x + SIDE / 2, y + 11.5, NAMES[rank][token], "middle", 11))

    def path(x: float, start: tuple[int, int], end_x: float, end: tuple[int, int], rank: int, token: int) -> None:
        (x1, y1), (x2, y2) = (x + SIDE, at(*start) + SIDE / 2), (end_x, at(*end) + SIDE / 2)
        bend = (x2 - x1) / 2
        colour = LINE[CHOICES[rank][token]]
        lines.append(
            f'<path d="M{x1:g} {y1:g} C{x1 + bend:g} {y1:g} {x2 - bend:g} {y2:g} {x2:g} {y2:g}" fill="none"'
            f' stroke="{colour}" stroke-width="1.2"/>'
        )

    for rank, rows in enumerate(went):
        for token in range(len(CHOICES[rank])):
            dropped = token not in rows
            box(HOME, rank, token, rank, token, dropped)
            if dropped:
                boxes.append(_text(OUT + SIDE / 2, at(rank, token) + 11.5, "0", "middle", 11))
            else:
                box(OUT, rank, token, rank, token)
        for place, token in enumerate(rows):
            for x in (SORTED, BACK):
                box(x, rank, place, rank, token)
            path(HOME, (rank, token), SORTED, (rank, place), rank, token)
            path(BACK, (rank, place), OUT, (rank, token), rank, token)
            to = CHOICES[rank][token] // 2
            path(SORTED, (rank, place), ARRIVED, (to, came[to].index((rank, token))), rank, token)
    for lane, rows in enumerate(grouped):
        for place, (rank, token) in enumerate(rows):
            as_came = came[lane].index((rank, token))
            for x, where in ((ARRIVED, as_came), (EXPERT, place), (LEAVING, as_came)):
                box(x, lane, where, rank, token)
            path(ARRIVED, (lane, as_came), EXPERT, (lane, place), rank, token)
            path(EXPERT, (lane, place), THROUGH, (lane, place), rank, token)
            path(THROUGH + WIDE - SIDE, (lane, place), LEAVING, (lane, as_came), rank, token)
            path(LEAVING, (lane, as_came), BACK, (rank, went[rank].index(token)), rank, token)
        for expert in (2 * lane, 2 * lane + 1):
            held = [place for place, (rank, token) in enumerate(rows) if CHOICES[rank][token] == expert]
            top, bottom = at(lane, held[0]) - 2, at(lane, held[-1]) + SIDE + 2
            boxes.append(
                f'<rect x="{THROUGH}" y="{top:g}" width="{WIDE}" height="{bottom - top:g}" rx="4"'
                f' fill="#ffffff" stroke="{LINE[expert]}" stroke-width="1.4"/>'
            )
            boxes.append(_text(THROUGH + WIDE / 2, (top + bottom) / 2 + 4, f"expert {expert}", "middle", 12))

    heads = {
        (HOME, "tokens"): "choose",
        (SORTED, "take_rows"): "by expert",
        (ARRIVED, "all_to_all"): "as they come",
        (EXPERT, "permute_rows"): "by expert",
        (THROUGH + (WIDE - SIDE) / 2, "experts"): "up, gelu, down",
        (LEAVING, "permute_rows"): "as they came",
        (BACK, "all_to_all"): "back",
        (OUT, "combine"): "x probability",
    }
    words = []
    for (x, title), below in heads.items():
        words.append(_text(x + SIDE / 2, 30, title, "middle", 13))
        words.append(_text(x + SIDE / 2, 47, below, "middle", 11, "#52606d"))
    for lane in (0, 1):
        words.append(_text(16, at(lane, 4), f"rank {lane}", "start", 13, "#52606d"))
    dropped = [NAMES[r][token] for r in (0, 1) for token in range(8) if token not in went[r]]
    late = f"Dashed: {', '.join(dropped)} came too late and pass by on the residual stream."
    said = f"8 tokens a row, 4 experts: {places} places of each for a row.  {late}"
    words.append(_text(16, 438, said, "start", 11, "#52606d"))
    title = "The way of tokens through a layer of four experts on two ranks"
    return (
        "\n".join(
            [
                '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 900 454" width="900" height="454"'
                ' font-family="ui-monospace, Menlo, DejaVu Sans Mono, monospace" font-size="13">',
                f"<title>{title}</title>",
                '<rect width="900" height="454" rx="8" fill="#ffffff"/>',
                *words,
                *lines,
                *boxes,
                "</svg>",
            ]
        )
        + "\n"
    )


def _text(x: float, y: float, text: str, anchor: str, size: int, colour: str = "#1f2933") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{colour}" font-size="{size}">{text}</text>'
