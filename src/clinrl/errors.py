"""The refusals a user can cause. The message is the one sentence the user reads; the class decides the exit code."""

import re


def masked(text: str) -> str:
    """Text without the credentials of the addresses in it."""
    return re.sub(r"//[^/\s]*@", "//", text)


def told(error: OSError) -> str:
    """What the system refused, as a sentence: a full disk, a folder that cannot be written."""
    return f"{error.filename or 'the system'}: {error.strerror or error}; mend that, and give the same command again"


class Refused(Exception):
    """Something was not done, and the message says what, why and what to do."""

    exit_code = 1


class ParamsError(Refused):
    """params.yaml asks for something that cannot be: names the key, the value and what is allowed."""

    exit_code = 2


class ArtefactError(Refused):
    """An artefact is missing, incomplete or altered: names the file and how to get it back."""


class DataError(Refused):
    """A case or a data set is not what it must be: names the file, the row and the column."""


class ProbeError(Refused):
    """A reward or a stream would teach the wrong thing: names the policy that it pays."""


class TrainingError(Refused):
    """Training ended without an adapter: names the step, and whether the same command continues it."""

    exit_code = 3


class Alarmed(TrainingError):
    """An alarm ended a training: the same command would end the same way."""

    exit_code = 4


class Busy(Refused):
    """Another command is writing the same artefact. Nothing was touched; try again when it is done."""

    exit_code = 75


class GateError(Refused):
    """A version may not be released: names the limit that broke, or what the decision was not about."""


class RegistryError(Refused):
    """The model registry did not do what was asked: names the server, the model or the alias."""


class SignatureError(Refused):
    """A key or a signature is not what it must be: names the file, and what to do; never a secret."""
