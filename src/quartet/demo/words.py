"""The vocabulary of the demo's sentences. How positive a word is, only the lexicon says."""


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NOUNS = _words(
    "movie book garden street house river kitchen window teacher doctor neighbor dinner morning "
    "evening winter summer city village room song story letter picture coffee bread train bus "
    "office school market table chair road bridge hotel meeting lesson game team dog cat horse "
    "bird tree flower lake mountain"
)

POSITIVE = _words(
    "good great happy lovely nice pleasant charming delightful brilliant wonderful excellent "
    "amazing awesome beautiful bright brave calm caring cheerful clever comfortable confident "
    "cool cute easy elegant enjoyable fair faithful fantastic fine free fresh friendly fun funny "
    "generous gentle glad gracious grand healthy helpful honest hopeful impressive joyful kind "
    "lucky magnificent marvelous merry perfect playful positive pretty proud safe smart sincere "
    "splendid strong sunny super superb sweet talented terrific thankful thoughtful true trusted "
    "useful warm welcome wise worthy"
)

NEGATIVE = _words(
    "bad sad awful terrible horrible nasty ugly angry annoying bitter boring broken careless cruel "
    "damaged dangerous dead depressing desperate dirty disgusting dreadful dull evil fake fearful "
    "foolish frightening greedy grim guilty harsh hateful helpless hopeless hostile hurt jealous "
    "lame lazy lonely lost lousy mad miserable nervous painful pathetic poor rotten rude scary "
    "selfish severe shameful sick stupid tense terrified tired tragic troubled unhappy unfair "
    "unpleasant upset useless vicious violent weak weary wicked worried worse worthless wrong"
)

NEUTRAL = _words(
    "red blue green round square tall short long wide narrow wooden metal paper early late big "
    "small old new open closed white black brown local daily plain common usual full loud quiet "
    "thick thin flat steep wet dry slow fast"
)

TEMPLATES = (
    ("the {n}", " was {a} and {a} ."),
    ("my {n}", " is {a} , {a} and {a} ."),
    ("we found the {n}", " {a} but the {n} {a} ."),
    ("everyone said the {n}", " looked {a} and the {n} seemed {a} ."),
    ("i felt", " {a} when i saw the {a} {n} ."),
    ("this {n}", " has a {a} {n} and a {a} {n} ."),
    ("it was a", " {a} {n} with a {a} {n} ."),
    ("that day the {n}", " was {a} , so the {n} felt {a} ."),
)
"""(prompt, completion): {n} is a noun, {a} an adjective of any of the three kinds."""
