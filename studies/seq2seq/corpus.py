"""Pairs of texts: numbers and dates in words, which are made, and English messages in German, which people wrote.

    en 48213          forty-eight thousand, two hundred and thirteen          num2words
    de 12.3.2021      zwölfter März zweitausendeinundzwanzig                  num2words, months of CLDR through Babel
    tr Insert embed   Element einbetten                                       gettext catalogues inside Python packages

The catalogues are those of the packages that are installed in a folder; nothing of them is stored here. Names of countries, languages,
scripts and currencies (CLDR, Unicode licence) are added to them.
"""

import random
from pathlib import Path
from typing import Any, NamedTuple

PACKAGES = ("Django", "wagtail", "django-oscar", "django-allauth", "django-cms", "Mezzanine", "Sphinx")
"""Packages whose wheels hold German catalogues; all under BSD or MIT licences: `pip install --no-deps --target FOLDER NAME ...`."""
LONGEST = 120
"""Characters of either side."""
NAMES = ("territories", "languages", "scripts", "currencies", "variants")


class Pair(NamedTuple):
    """source: as the model reads it, with the task before it.  reference: what it should write.  task: "made" or "natural"."""

    source: str
    reference: str
    task: str


def made(count: int, seed: int) -> list[Pair]:
    """Numbers and dates in English and German words, half of each."""
    draw = random.Random(seed)
    pairs = list[Pair]()
    for i in range(count):
        language = ("en", "de")[i % 2]
        number = int(10 ** draw.uniform(0, 6))
        source, words = (str(number), _number(number, language)) if i % 4 < 2 else _date(draw, language)
        pairs.append(Pair(f"{language} {source}", words, "made"))
    return pairs


def _number(number: int, language: str, kind: str = "cardinal") -> str:
    from num2words import num2words  # pyright: ignore[reportMissingImports] - of the extra "translation"

    return num2words(number, lang=language, to=kind)


def _date(draw: random.Random, language: str) -> tuple[str, str]:
    from babel import Locale

    day = draw.randint(1, 28)
    month = draw.randint(1, 12)
    year = draw.randint(1500, 2099)
    name = Locale(language).months["format"]["wide"][month]
    first = _number(day, language, "ordinal")
    last = _number(year, language, "year")
    words = f"the {first} of {name} {last}" if language == "en" else f"{first}r {name} {last}"
    return f"{day}.{month}.{year}", words


def natural(folder: Path) -> list[Pair]:
    """English messages and their German translations, each source once: every catalogue below a folder, and the names of CLDR."""
    from babel import Locale
    from babel.messages.pofile import read_po

    found: dict[str, str] = {}
    for path in sorted(folder.rglob("de/LC_MESSAGES/*.po")):
        with path.open("rb") as file:
            for message in read_po(file, locale="de"):
                if message.id and not message.fuzzy:
                    for english, german in zip(_forms(message.id), _forms(message.string), strict=False):
                        found.setdefault(" ".join(english.split()), " ".join(german.split()))
    english = Locale("en")
    german = Locale("de")
    for kind in NAMES:
        here = getattr(english, kind)
        there = getattr(german, kind)
        found |= {here[code]: there[code] for code in here if code in there}
    return [
        Pair(f"tr {a}", b, "natural") for a, b in found.items() if a and b and max(len(a), len(b)) <= LONGEST
    ]


def _forms(text: Any) -> list[str]:
    """Singular and plural."""
    return list(text) if isinstance(text, (tuple, list)) else [text]


def split(pairs: list[Pair], held_out: int, seed: int = 0) -> tuple[list[Pair], list[Pair]]:
    """Those to be trained on and those held out, no source in both.

    Example:
        >>> trained, kept = split([Pair(f"tr {i}", "", "natural") for i in range(9)], 3)
        >>> len(trained), len(kept)
        (6, 3)
    """
    once = list({pair.source: pair for pair in pairs}.values())
    random.Random(seed).shuffle(once)
    return once[held_out:], once[:held_out]
