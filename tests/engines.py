"""An imitation of `vllm serve` 0.30.0: its routes and its answers, written by transformers and PEFT on a tiny model.

Routes, fields and sentences of refusal are those of vLLM's source; what is not needed here is left out.
"""

import json
import shutil
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl.chat_template_utils import add_response_schema

import dolls
from clinrl.config.machine import Vllm
from clinrl.models import rollout
from clinrl.models.chat import write_turn
from clinrl.models.engine import Engine
from clinrl.models.vllm_client import Client
from clinrl.tasks.base import get_task
from clinrl.training import trl
from clinrl.types import Call, Message

VERSION = "0.30.0"
SPEC = {"task": "esi", "seed": 5, "lora": {"rank": 4, "alpha": 8.0, "targets": "all-linear"}}
"""What says of an adapter that was never trained which shape it has."""


@dataclass
class Imitation:
    """A server of one model, and how it fails."""

    model: Any
    name: str
    key: str = "k" * 40
    max_length: int = 1024
    max_rank: int = 16
    layers: str = ""
    """Names of an adapter's layers that it does not know."""
    takes_adapters: bool = True
    """VLLM_ALLOW_RUNTIME_LORA_UPDATING"""
    has_lora: bool = True
    """--enable-lora"""
    ignores_adapters: bool = False
    """As vLLM does with layers whose names it does not know."""
    wrong: Path | None = None
    """The folder whose adapter it serves by whatever name and path it is given."""
    is_stale: bool = False
    """It goes on with the first adapter that it loaded."""
    busy: int = 0
    """Requests that it answers with 503 before any other."""
    drops: int = 0
    """Connections that it closes without an answer before any other."""
    changes: Callable[[dict[str, Any]], Any] = lambda answer: answer
    """What becomes of a completion before it is sent."""
    dies_after: int | None = None
    fingerprint: str = "vllm-0.30.0-0123abcd"
    adapters: dict[str, Path] = field(default_factory=dict)
    asked: list[dict[str, Any]] = field(default_factory=list)
    """Bodies of requests for completions."""
    paths: list[str] = field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    first: Path | None = None

    @contextmanager
    def counted(self, body: dict[str, Any]) -> Iterator[None]:
        """Count a request until its answer is made: once it is sent, whoever asked may ask again at once."""
        with self.lock:
            self.asked.append(body)
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            yield
        finally:
            with self.lock:
                self.at_once -= 1

    def load(self, name: str, folder: Path) -> tuple[int, str]:
        """`POST /v1/load_lora_adapter`: the status and what is said."""
        if not self.has_lora:
            return 500, "Call to add_lora method failed: LoRA is not enabled. Use --enable-lora to enable LoRA."
        if name in self.adapters:
            return 400, (
                f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set "
                "'load_inplace' to True."
            )
        if not (folder / "adapter_config.json").exists():
            return 404, f"Loading lora {name} failed: No adapter found for {folder}"
        rank = json.loads((folder / "adapter_config.json").read_text())["r"]
        if self.layers:
            says = f"While loading <path>, expected target modules in {{'q_proj'}} but received {self.layers}."
            return 500, f"Call to add_lora method failed: {says}"
        if rank > self.max_rank:
            return 500, f"LoRA rank {rank} is greater than max_lora_rank {self.max_rank}."
        if self.is_stale and self.first is None:  # a copy, since the trainer removes what it no longer serves
            self.first = Path(shutil.copytree(folder, folder.with_name("first")))
        source = self.wrong or (self.first if self.is_stale else folder)
        held = "".join(c for c in name if c.isalnum())
        if isinstance(self.model, PeftModel):
            self.model.load_adapter(str(source), adapter_name=held)
        else:
            self.model = PeftModel.from_pretrained(self.model, str(source), adapter_name=held).eval()
        self.adapters[name] = folder
        return 200, f"Success: LoRA adapter '{name}' added successfully."

    def complete(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """`POST /v1/completions` of one prompt in token ids."""
        name, prompt, most = body["model"], body["prompt"], body["max_tokens"]
        if name != self.name and name not in self.adapters:
            return 404, error(404, f"The model `{name}` does not exist.", "NotFoundError")
        if len(prompt) + most > self.max_length:
            says = f"This model's maximum context length is {self.max_length} tokens. However, you requested {most}"
            return 400, error(400, says, "BadRequestError")
        with self.lock, torch.inference_mode():
            ids, logs, reason = self._write(name, prompt, most, body)
        choice = {
            "index": 0, "text": "", "finish_reason": reason, "stop_reason": None, "token_ids": ids,
            "prompt_token_ids": prompt,
            "logprobs": {"token_logprobs": logs, "tokens": [], "text_offset": [], "top_logprobs": []},
        }  # fmt: skip
        return 200, {
            "id": "cmpl-1", "object": "text_completion", "model": name, "choices": [choice],
            "system_fingerprint": self.fingerprint, "usage": {},
        }  # fmt: skip

    def _write(self, name: str, prompt: list[int], most: int, body: dict[str, Any]) -> tuple[list[int], Any, str]:
        generator = torch.Generator().manual_seed(body["seed"])
        beside: Any = nullcontext()
        if isinstance(self.model, PeftModel):
            if name == self.name or self.ignores_adapters:
                beside = self.model.disable_adapter()
            else:
                self.model.set_adapter("".join(c for c in name if c.isalnum()))
        ids, logs, cache = list[int](), list[float](), None
        fed = torch.tensor([prompt])
        with beside:
            while len(ids) < most:
                output = self.model(input_ids=fed, past_key_values=cache, use_cache=True)
                cache, scores = output.past_key_values, output.logits[0, -1].float()
                if body["temperature"] > 0:
                    chances = (scores / body["temperature"]).log_softmax(-1)
                    token = int(torch.multinomial(chances.exp(), 1, generator=generator))
                else:
                    chances = scores.log_softmax(-1)
                    token = int(scores.argmax())
                ids.append(token)
                logs.append(float(chances[token]))
                if token in body["stop_token_ids"]:
                    return ids, logs, "stop"
                fed = torch.tensor([[token]])
        return ids, logs, "length"


def error(code: int, message: str, kind: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def answers(imitation: Imitation) -> type[BaseHTTPRequestHandler]:  # noqa: C901  # an imitation of a server, class and all
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            """Nothing: the tests read `asked`."""

        def send(self, status: int, answer: Any) -> None:
            text = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def fails(self) -> bool:
            imitation.paths.append(self.path)
            if imitation.drops > 0:
                imitation.drops -= 1
                self.close_connection = True
                return True
            if imitation.busy > 0:
                imitation.busy -= 1
                self.send(503, error(503, "busy", "ServiceUnavailable"))
                return True
            if self.headers["Authorization"] != f"Bearer {imitation.key}":
                self.send(401, {"error": "Unauthorized"})
                return True
            return False

        def do_GET(self) -> None:
            if self.fails():
                return
            card = {"id": imitation.name, "object": "model", "root": "/checkpoint", "parent": None,
                    "max_model_len": imitation.max_length}  # fmt: skip
            above = [
                {"id": name, "object": "model", "root": str(folder), "parent": imitation.name, "max_model_len": None}
                for name, folder in imitation.adapters.items()
            ]
            found: dict[str, Any] = {
                "/health": "", "/version": {"version": VERSION},
                "/v1/models": {"object": "list", "data": [card, *above]},
            }  # fmt: skip
            self.send(*((200, found[self.path]) if self.path in found else (404, error(404, "Not Found", "Not Found"))))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.fails():
                return
            if self.path == "/v1/completions":
                self.completion(body)
            elif imitation.takes_adapters and self.path == "/v1/load_lora_adapter":
                status, says = imitation.load(body["lora_name"], Path(body["lora_path"]))
                self.send(status, says if status == 200 else error(status, says, "Error"))
            elif imitation.takes_adapters and self.path == "/v1/unload_lora_adapter":
                del imitation.adapters[body["lora_name"]]
                self.send(200, "Success")
            else:
                self.send(404, error(404, "Not Found", "Not Found"))

        def completion(self, body: dict[str, Any]) -> None:
            with imitation.counted(body):
                if imitation.dies_after is not None and len(imitation.asked) > imitation.dies_after:
                    self.close_connection = True
                    return
                time.sleep(0.001)
                status, answer = imitation.complete(body)
            self.send(status, imitation.changes(answer) if status == 200 else answer)

    return Handler


@contextmanager
def served(imitation: Imitation, tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """The address at which an imitation listens; with `tls` it speaks that."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), answers(imitation))
    if tls:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http{'s' if tls else ''}://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def adapt(model: Any, seed: int, std: float = 0.3) -> Any:
    """A model with an adapter that changes what it writes."""
    adapted = trl.start_adapter(model, SPEC | {"seed": seed}, None)
    with torch.no_grad():
        for name, weights in adapted.named_parameters():
            if "lora_B" in name:
                weights.normal_(std=std, generator=torch.Generator().manual_seed(seed))
    return adapted.eval()


def auditor() -> tuple[Any, Any]:
    """A tiny model that was taught to call one of two tools, whatever it is asked, and its tokenizer."""
    task = get_task("audit")
    calls = [
        write_turn(Message(role="assistant", content="", calls=(Call(name=name, arguments=given),)), False)
        for name, given in {"investigate_patient": {"patient_id": "P1"}, "approve": {"proposal_id": "A1"}}.items()
    ]
    cases = task.cases(3, 3, pool="train", mix="easy")
    asked = [message.content for case in cases for message in task.prompt(case.facts)]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=dolls._bpe([*asked, *calls, json.dumps(rollout.schemas(task))], 1500), eos_token=dolls.EOS,
        pad_token=dolls.PAD, additional_special_tokens=[dolls.START], padding_side="left",
        clean_up_tokenization_spaces=False,
    )  # fmt: skip
    tokenizer.chat_template = (dolls.TEMPLATE.parent / "qwen2_5.jinja").read_text(encoding="utf-8")
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, intermediate_size=32, max_position_embeddings=8192,
            eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
        )
    )  # fmt: skip
    head = [f"{dolls.START}assistant\n<think>\n\n</think>\n\n"] * 2
    dolls._teach(model, tokenizer, head, [call + dolls.EOS for call in calls])
    return model.eval(), add_response_schema(tokenizer)


def asked(url: str, imitation: Imitation, tokenizer: Any) -> Engine:
    """The engine that asks an imitation."""
    client = Client(
        url, imitation.key, Vllm(url=url), imitation.name, ends=frozenset([tokenizer.eos_token_id]),
        vocabulary=len(tokenizer), start="start it",
    )  # fmt: skip
    client.check()
    return Engine(client, tokenizer, imitation.max_length, copies=Path("engines"))
