"""The server as clients have it: OpenAI's own, unmodified, and whoever sends something else."""

import json
from typing import Any

import httpx
import openai
import pytest
from conftest import Running
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from clinrl import paths
from clinrl.data.dataset import read_cases
from clinrl.models.chat import read_turn
from clinrl.models.generate import Prompt
from clinrl.tasks.base import get_task


def asked(number: int = 0) -> list[dict[str, str]]:
    case = list(read_cases(paths.cases("x1"), get_task("esi")))[number]
    return [{"role": one.role, "content": one.content} for one in get_task("esi").prompt(case.facts)]


def thinks(wanted: bool) -> dict[str, Any]:
    return {"extra_body": {"chat_template_kwargs": {"enable_thinking": wanted}}}


def test_smoke(served: Running):
    print(served.live.names.keys(), served.live._said)
    one = served.client.chat.completions.create(model="esi@champion", messages=asked(), **thinks(True))
    print(one)
    for chunk in served.client.chat.completions.create(model="esi@candidate", messages=asked(), stream=True, stream_options={"include_usage": True}, **thinks(True)):
        print(chunk)
    assert 0
