"""Find three things that nurses miss in a triage narrative: an intervention done, severe pain, an open injury.

The stems are those of the published v49 card, whose tables survive only in part (rows "intubat | chest tube ...",
"open fracture | penetrating ...", "pain >= 7"); central line, gunshot and stab are our completion. The treatment of
negation, history, removal and other people is ours too (after the NegEx and ConText algorithms): a bare stem would
fire on "do-not-intubate", on "chest tube removed" and on "mother has a central line".

The narrative alone is read, never a completion, so a policy cannot earn anything by writing a trigger word.

All patterns run over text whose white space is single spaces, look at most `_WINDOW` characters to either side of a
stem, and repeat nothing inside a repetition without a bound, so the time is proportional to the narrative's length.
"""

import re
from dataclasses import dataclass
from typing import Final

SEVERE_PAIN_0_10: Final = 7.0
"""Pain at or above this is severe (ESI handbook, decision point B: "severe pain or distress", 7 or more of 10)."""

_WINDOW: Final = 160
"""Characters before and after a stem that can negate it."""
_REACH_WORDS: Final = 6
"""Words between a negation and what it negates, counted afresh after each comma of a list (NegEx uses five or six)."""


@dataclass(frozen=True, kw_only=True)
class _Stem:
    """A phrase to look for, and the text after it that cancels it."""

    pattern: re.Pattern[str]
    undone: re.Pattern[str]
    """Matched from the phrase's end onwards."""
    noun: bool
    """A noun can be an item of a negated list ("no fever, rash or chest tube") or of a history ("prior intubation");
    a participle ("no fever, intubated by the crew") begins a statement of its own."""


_NOT_SO = (
    r"(?:(?:was|were|is|are|has|have) )?(?:been )?ruled out\b"
    r"|(?:(?:was|were|is|are|has|have|does|did) )?(?:not|never) (?:been )?(?:yet )?(?:done|found|identified|in place"
    r"|indicated|inserted|necessary|needed|performed|placed|present|required|seen|suspected)\b"
    r"|(?:denied|excluded)(?= ?[.,;)]| by\b|$)"
    r"|scars?\b"
)
_BETWEEN = r"(?: (?!and\b|or not\b|after\b|when\b|with\b|by\b|once\b|but\b|before\b|while\b)[a-z0-9'/-]+){0,4}?"
_DEVICE = r"(?:chest[ -]tubes?|(?:tube )?thoracostomy(?: tubes?)?|central(?: venous)?[ -](?:lines?|catheters?))"

_INJURY_UNDONE = re.compile(rf"{_BETWEEN} (?:{_NOT_SO})")
_DEVICE_UNDONE = re.compile(
    rf"(?: (?:and|or) (?:an? |the )?{_DEVICE})?{_BETWEEN}"
    rf" (?:{_NOT_SO}|(?:removed|removal|discontinued|pulled|withdrawn|taken out)\b"
    # "A central line was considered but not inserted."
    r"|(?:considered|discussed|planned|offered)\b[^.;,]{0,60}\bbut (?:was )?(?:not|never)\b"
    r"|(?:avoided|cancell?ed|declined|deferred|refused)(?= ?[.,;)]| by\b|$))"
)
_INTUBATION_UNDONE = re.compile(
    rf"{_BETWEEN} (?:{_NOT_SO}|(?:avoided|cancell?ed|declined|deferred|refused)(?= ?[.,;)]| by\b|$))"
    r"|(?: attempts?| attempted| tried)?(?:,| but)? (?:failed|unsuccessful(?:ly)?)\b"
    r"|(?:(?!\bafter\b|\bfollowing\b)[^.;]){0,120}\bextubat"
)

_DONE_INTERVENTION: Final = (
    _Stem(pattern=re.compile(r"\b(?:re-?)?intubat(?:ed|e|es|ing)\b"), undone=_INTUBATION_UNDONE, noun=False),
    _Stem(pattern=re.compile(r"\b(?:re-?)?intubations?\b"), undone=_INTUBATION_UNDONE, noun=True),
    _Stem(pattern=re.compile(rf"\b{_DEVICE}\b"), undone=_DEVICE_UNDONE, noun=True),
)
_OPEN_INJURY: Final = (
    _Stem(
        pattern=re.compile(
            r"\b(?:open|compound)(?:[ -](?!and\b|or\b|closed\b|no\b|not\b|with\b|without\b|wounds?\b|lacerations?\b"
            r"|over\b|reduction\b)[a-z/]+){0,3}[ -](?:fractures?|fx)\b"
            r"|\bpenetrat(?:ing(?! (?:pain|aches?|headaches?|discomfort)\b)|ed|es)\b"
            r"|(?<!vaginal )(?<!anal )(?<!sexual )(?<!penile )\bpenetration\b|\bgun ?-?shots?\b|\bgsws?\b"
            # "Stabbing pain" describes a pain, as one "that stabs" and a "stab-like" one do; the deed is an injury.
            r"|\bstab\b(?![ -]like (?:ache|discomfort|pain|sensation)s?\b)|(?<!that )(?<!which )\bstabs\b"
            r"|\bstabbing (?:assault|attack|incident|injur(?:y|ies)|victim|wounds?)\b|(?<=victim of )(?:a )?stabbing\b"
        ),
        undone=_INJURY_UNDONE,
        noun=True,
    ),
    _Stem(pattern=re.compile(r"\bstabbed\b"), undone=_INJURY_UNDONE, noun=False),
)

_TOKEN = re.compile(r"[0-9]+\.[0-9]+|[a-z0-9/']+|[,;.!?()\u2014]")
_FULL_STOPS = frozenset(";.!?()\u2014")
_DENIALS = frozenset({"deny", "denies", "denied", "denying"})
_NEGATIONS = _DENIALS | frozenset(
    {
        "no", "not", "non", "nor", "never", "neither", "without", "w/o", "cannot", "negative", "absent", "instead",
        "rather", "ruled", "rules", "excludes", "excluded", "excluding", "avoid", "avoids", "avoided", "avoiding",
        "averted", "refuse", "refuses", "refused", "refusing", "decline", "declines", "declined", "declining",
    }
)  # fmt: skip
# Words that open a statement which an earlier negation does not reach: "no pulse after intubation".
_BREAKS = frozenset(
    {
        "after", "although", "as", "because", "before", "but", "despite", "due", "during", "except", "following",
        "however", "into", "needing", "now", "once", "requires", "required", "requiring", "since", "so", "then",
        "therefore", "though", "until", "when", "which", "while", "who",
    }
)  # fmt: skip
_FILLERS = frozenset({"a", "an", "any", "other", "recent", "the"})
_JOINS_WITH = frozenset({"associated", "compatible", "consistent"})
_LIST_GOES_ON = re.compile(r"(?: [a-z0-9'/-]+){0,3},[^.;!?]{0,120}\b(?:or|nor)\b")
_HISTORY_BEFORE = re.compile(
    r"\b(?:history of|hx of|h/o|prior(?! to\b)|previous)(?: (?!and\b|after\b|arriv|brought\b|came\b|following\b|found\b"
    r"|from\b|had\b|has\b|is\b|now\b|present|status\b|suffer|sustain|today\b|was\b|who\b|with\b)[a-z0-9'/-]+){0,4} ?$"
)
_NOT_YET = re.compile(
    r"\b(?:(?:may|might|should|will|would)(?: (?:also|be|have|likely|need|require|soon|still|then|to|well)){0,3}"
    r"|(?:anticipat|consider|discuss)(?:e|es|ed|ing|s)?|(?:candidate|plan|planned|prepared?|preparing|ready) for"
    r"|impending|possible|possibly|potential|risk of|failed|unsuccessful|attempted"
    r"|(?:attempted|attempting|failed|needs|tried|trying|unable|wants)(?: (?:her|him))? to(?: be)?)"
    r"(?: (?:an?|early|emergent|the|urgent)){0,2} ?$"
)
"""Words before something that was not done before arrival: "may need intubation", "unable to intubate"."""
_SEVERAL_TIMES = re.compile(r" (?:x ?[2-9]|twice|[2-9] times|several times)(?! (?:attempts?|by|en|in|on)\b)")
_IN_HISTORY = re.compile(r"\b(?:pmhx?|pmh/x|psh|hx|history)\b[^.;]*$")
"""Together with `_SEVERAL_TIMES`, a history: "PMH asthma, intubated x2"."""
_PREVIOUSLY = re.compile(r"\bpreviously(?: [a-z]+){0,2} ?$")
_HISTORY_AFTER = re.compile(
    r"[^,.;]{0,60}\b(?:in the past|as a child|previously|last (?:week|month|year)"
    r"|(?:in|from|since) (?:19|20)[0-9]{2}|(?:[0-9]+|a few|few|many|several) (?:weeks?|months?|years?) ago)\b"
)
_SOMEBODY_ELSE = re.compile(
    r"[.;] (?:(?:an?|her|his|one|the|their|pt's|patient's) )?(?:aunt|boss|brother|classmate|colleague|cousin|daughter"
    r"|father|flatmate|friend|grandfather|grandmother|husband|mother|neighbou?r|nephew|niece|opponent|opposing [a-z]+"
    r"|parent|partner|passenger|relative|roommate|sibling|sister|sister-in-law|son|spouse|teammate|uncle|wife)\b"
    # People who report on the patient, or bring the patient, are not the subject.
    r"(?! (?:says|states|reports|reported|notes|noted|noticed|found|called|brought|brings|drove|witnessed|saw)\b)"
    r"[^.;,]*$"
)

_SCORE_OF_TEN = re.compile(
    r"(?<![0-9/.:-])(?:([0-9]{1,2}(?:\.[0-9])?) ?(?:-|\u2013|to) ?)?([0-9]{1,2}(?:\.[0-9])?) ?"
    r"(?:/|(?:out )?of) ?10(?![0-9]|/[0-9]|\.[0-9]|-[0-9])"
)
_SCORE_AFTER_PAIN = re.compile(
    r"\bpain(?: (?:score|level|scale|rating|severity|rated|scored|intensity)(?: at)?)?"
    r"(?: (?:is|was|of|now|currently|as|an?)){0,3}(?: ?[:=] ?| )(?:(?:now|currently) )?"
    r"([0-9]{1,2})(?: ?(?:-|\u2013|to) ?([0-9]{1,2}))?(?![0-9]|[/:][0-9]|\.[0-9]| ?[%x\u00b0])"
    # A number with a unit is a duration, a time, an age or a dose; so is each number of a range with a unit.
    r"(?!(?:(?:-|\u2013| ?to ?)[0-9]+(?:[.:][0-9]+)?)?"
    r"(?: |-)?(?:st|nd|rd|th|a\.?m|p\.?m"
    r"|hours?|hrs?|h|minutes?|mins?|days?|d|weeks?|wks?|months?|years?|yrs?|y/?o|times"
    r"|episodes|mg|mcg|ml|cm|mm|of [0-9]+|out of [0-9]+)\b)"
)
_SCALE = re.compile(r"\b[01] ?(?:-|\u2013|to) ?10\b(?!/)(?: scale\b)?[: ]*")
"""The name of the scale, which is no score, as in "pain scale 0-10: 3"."""
_OTHER_SUBJECT = re.compile(
    r"\b(?:lmp|symptoms? (?:began|onset|started))[ :]*$"
    r"|\b(?:apgar|acuity|vision|nausea|anxiety|itch(?:ing)?|fatigue|dyspn(?:o)?ea|breathlessness|dizziness|on|since|until"
    r"|dated)(?: (?!pain\b)[a-z]+){0,2}[ :]*$"
)
_NO_PAIN = re.compile(
    r"\b(?:den(?:y|ies|ied|ying)|no|without)(?: (?:any|current|complaints? of|other))? pain\b|\bpain[ -]free\b"
)


def done_intervention(narrative: str) -> bool:
    """True if the narrative reports an intubation, a chest tube or a central line that is in place on arrival."""
    return _reports(narrative, _DONE_INTERVENTION)


def open_injury(narrative: str) -> bool:
    """True if the narrative reports an open fracture or a penetrating injury (gunshot and stab wounds included)."""
    return _reports(narrative, _OPEN_INJURY)


def severe_pain(narrative: str) -> bool:
    """True if the narrative gives a pain score of `SEVERE_PAIN_0_10` or more."""
    score = pain_0_10(narrative)
    return score is not None and score >= SEVERE_PAIN_0_10


def pain_0_10(narrative: str) -> float | None:
    """The highest pain score of the narrative, 0 to 10; 0.0 for pain that is only denied; None without either.

    Reads 8/10, 8 of 10, 8 out of 10, pain score 8, pain 8, and ranges by their upper end. Fractions of other things
    (vision 20/20, BP 120/80, 2/6 murmur, dates, durations) are no scores, nor are the name of the scale (0-10) and
    anything above 10.
    """
    text = _SCALE.sub("", _plain(narrative))
    scores = [
        max(float(part) for part in match.groups() if part is not None)
        for pattern in (_SCORE_OF_TEN, _SCORE_AFTER_PAIN)
        for match in pattern.finditer(text)
        if not _OTHER_SUBJECT.search(before := text[max(0, match.start() - _WINDOW) : match.start()])
        and not _SOMEBODY_ELSE.search(before)
    ]
    scores = [score for score in scores if score <= 10.0]
    if scores:
        return max(scores)
    return 0.0 if _NO_PAIN.search(text) else None


def _reports(narrative: str, stems: tuple[_Stem, ...]) -> bool:
    """True if any stem occurs and nothing around it cancels it."""
    text = _plain(narrative)
    return any(
        _holds(stem, text[max(0, match.start() - _WINDOW) : match.start()], text[match.end() : match.end() + _WINDOW])
        for stem in stems
        for match in stem.pattern.finditer(text)
    )


def _holds(stem: _Stem, before: str, after: str) -> bool:
    if stem.undone.match(after) or _HISTORY_AFTER.match(after) or _SOMEBODY_ELSE.search(before):
        return False
    if _SEVERAL_TIMES.match(after) and _IN_HISTORY.search(before):
        return False
    if _negated(stem, before, after) or (stem in _DONE_INTERVENTION and _NOT_YET.search(before)):
        return False
    return not (_HISTORY_BEFORE if stem.noun else _PREVIOUSLY).search(before)


def _negated(stem: _Stem, before: str, after: str) -> bool:
    """Walk from the stem back to the start of its clause; True if a negation comes first."""
    tokens = _TOKEN.findall(before)
    words, alternatives, joined = 0, stem.noun and bool(_LIST_GOES_ON.match(after)), False
    since_stem: set[str] = set()
    for index in range(len(tokens) - 1, -1, -1):
        token = tokens[index]
        if token in _FULL_STOPS:
            return False
        if token in _NEGATIONS or token.endswith("n't"):
            return (token in _DENIALS or not joined) and tokens[index + 1 : index + 2] != ["only"]
        if token == ",":
            # A comma ends the clause, unless it separates the items of a list that "or" closes.
            if not (stem.noun and alternatives):
                return False
            words = 0
        elif token == "and":
            # "No pulse and chest tube placed" is two statements; "denies fever and stab wound" is one.
            if not stem.noun or since_stem - _FILLERS:
                return False
            joined = True
        elif token == "with":
            if tokens[index - 1 : index] and tokens[index - 1] in _JOINS_WITH:
                continue
            return False
        elif token in _BREAKS or words == _REACH_WORDS:
            return False
        else:
            alternatives = alternatives or token in ("or", "nor")
            words += 1
        since_stem.add(token)
    return False


def _plain(narrative: str) -> str:
    """Lower case, straight apostrophes, single spaces; a line break ends a clause as a semicolon does.

    The text also starts with a semicolon, so that every clause has a left end.
    """
    lines = (" ".join(line.split()) for line in narrative.lower().replace("\u2019", "'").splitlines())
    return "; " + "; ".join(line for line in lines if line)
