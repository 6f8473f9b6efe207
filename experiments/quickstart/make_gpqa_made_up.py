"""Write gpqa_made_up.csv: invented questions about an invented island, in the columns of GPQA.

Nothing in it is true and nothing comes from GPQA; it feeds the code that reads GPQA where the real file may
not be. Usage: python experiments/quickstart/make_gpqa_made_up.py [FILE]
"""

import csv
import random
import sys
from pathlib import Path

ROWS = 64
CANARY = "made-up rows; not from GPQA"
COLUMNS: tuple[str, ...] = (
    "Record ID",
    "High-level domain",
    "Subdomain",
    "Question",
    "Correct Answer",
    "Incorrect Answer 1",
    "Incorrect Answer 2",
    "Incorrect Answer 3",
    "Canary String",
)
SYLLABLES = (
    "vor",
    "mel",
    "tash",
    "qui",
    "ond",
    "bril",
    "esk",
    "ula",
    "fen",
    "dru",
    "zim",
    "orr",
    "pal",
    "nev",
)
PLACES = (
    "Murrow Cove",
    "the Teal Terraces",
    "Low Quenby",
    "the Saltward Cliffs",
    "Hob Valley",
    "Upper Drell",
)
COLOURS = ("green", "grey", "violet", "amber", "white", "rust-red", "pale blue", "black")
SUBJECTS = (
    (
        "Chemistry",
        "Invented minerals",
        "On the invented island of Ostrelle Minor the mineral {name} turns {first} in cold brine and "
        "{second} in warm oil. Which colour does the handbook of {place} name after both?",
        COLOURS,
    ),
    (
        "Physics",
        "Invented instruments",
        "The keeper of {place} on Ostrelle Minor tunes a {name} bell with {count} grains of {first} sand "
        "and {less} of {second}. By the island's rule, how long does it ring?",
        tuple(f"{n} slow counts" for n in (3, 5, 7, 9, 12, 15, 21, 30)),
    ),
    (
        "Biology",
        "Invented plants",
        "The {name} fern of {place} on Ostrelle Minor opens {count} {first} fronds at dusk and closes "
        "{less} of them by dawn. Which visitor does the almanac say it waits for?",
        (
            "the dune moth",
            "the lamp beetle",
            "the reed wren",
            "the salt bee",
            "the clay snail",
            "the mist hare",
        ),
    ),
)


def rows(count: int = ROWS) -> list[dict[str, str]]:
    """``count`` invented rows, the same ones every time."""
    generator = random.Random("Ostrelle Minor")
    names: list[str] = []
    while len(names) < count:
        name = "".join(generator.sample(SYLLABLES, 3)) + generator.choice(("ite", "ane", "ium", "el"))
        if name not in names:
            names.append(name)
    table = []
    for number, name in enumerate(names):
        domain, subdomain, template, answers = SUBJECTS[number % len(SUBJECTS)]
        first, second = generator.sample(COLOURS, 2)
        count_of, less = generator.randint(20, 90), generator.randint(2, 19)
        question = template.format(
            name=name, place=generator.choice(PLACES), first=first, second=second, count=count_of, less=less
        )
        choices = generator.sample(answers, 4)
        values = (f"made-up-{number:03d}", domain, subdomain, question, *choices, CANARY)
        table.append(dict(zip(COLUMNS, values, strict=True)))
    return table


def write(path: Path) -> None:
    """The CSV file, with line ends that do not depend on the machine."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows())


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("gpqa_made_up.csv"))
