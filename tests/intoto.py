"""Statements, read by the stock library of in-toto."""

from collections.abc import Mapping
from typing import Any

from google.protobuf.json_format import ParseDict
from in_toto_attestation.v1 import statement_pb2
from in_toto_attestation.v1.statement import Statement


def validated(statement: Mapping[str, Any]) -> Statement:
    """A statement as the library reads it, after its own check."""
    read = Statement.copy_from_pb(ParseDict(dict(statement), statement_pb2.Statement()))
    read.validate()
    return read
