"""`clinrl serve` over the embedded base, asked by OpenAI's client: requests a second, and how long each waits.

The adapter changes nothing, so that any clone has it; it computes as one of the series does. The registry is left out.
"""

import json
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import median, quantiles
from types import SimpleNamespace
from typing import Any

from clinrl.runtime import determinism

REQUESTS = 80
"""For each number of clients, in each mode."""
CLIENTS = (1, 8)
SEED = 1


def ready(task: str, to: Path, backend: Any) -> Any:
    """The task's base with an adapter that changes nothing, opened as a version."""
    import shutil

    from peft import LoraConfig, get_peft_model

    from clinrl import paths
    from clinrl.artifacts import identity, read_manifest, seal
    from clinrl.config.params import load_params
    from clinrl.models import bases
    from clinrl.models.generate import SHARED
    from clinrl.registry.pyfunc import ADAPTER, BASE, Decoding, Served
    from clinrl.serving.live import Version

    params = load_params()
    shutil.copytree(paths.base(task), to / BASE)
    model, _ = bases.open_base(to / BASE, for_training=False)
    lora = LoraConfig(r=16, lora_alpha=16.0, target_modules="all-linear", task_type="CAUSAL_LM")
    get_peft_model(model, lora).save_pretrained(to / ADAPTER)
    base, version = identity(read_manifest(to / BASE)), read_manifest(to / BASE).task_version
    made = seal(
        to / ADAPTER, kind="adapter", name="bench", task=task, task_version=version,
        spec={"trainer": {"generation_path": SHARED}}, inputs={"base": base},
    )  # fmt: skip
    modes = {
        name: Decoding(
            thinking=mode.thinking, temperature=mode.temperature, top_p=mode.top_p,
            max_new_tokens=params.budget(name, task),
        )
        for name, mode in params.modes.items()
    }  # fmt: skip
    served = Served(
        name="bench", task=task, task_version=version, digest=identity(made), base_digest=base, form="adapter",
        modes=modes, default_mode=next(iter(modes)),
    )  # fmt: skip
    sampler = backend.open(served, to)
    return Version(served, sampler, to, 0)


@contextmanager
def listening(to: Path) -> Iterator[tuple[Any, str]]:
    """A server of that version in this process, and its address."""
    import uvicorn

    from clinrl.runtime.guard import Fence, address_of, listen
    from clinrl.serving.backends import Local
    from clinrl.serving.server import Bounds, Server, Service

    backend, bounds = Local("embedded", max(CLIENTS)), Bounds(max(CLIENTS), 64, 4096, 600.0)
    version = ready("esi", to, backend)
    service = Service(SimpleNamespace(names={"bench": version}), backend, bounds)  # type: ignore[arg-type]
    server = Server(uvicorn.Config(Fence(service), log_level="warning", access_log=False), service)
    with listen("127.0.0.1", 0) as found:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [found]})
        thread.start()
        try:
            while not server.started:
                time.sleep(0.01)
            yield version, f"{address_of(found)}/v1"
        finally:
            server.should_exit = True
            thread.join()


def main() -> None:
    """Print the rows: for each mode and number of clients the rate, and of the waits the median and 95%."""
    determinism.settle(SEED)
    import openai

    from clinrl.tasks.base import get_task

    task = get_task("esi")
    cases = list(task.cases(REQUESTS, SEED, pool="mine", mix=task.checks.mixes[0]))
    prompts = [[{"role": one.role, "content": one.content} for one in task.prompt(case.facts)] for case in cases]
    rows: list[tuple[Any, ...]] = []
    with (
        tempfile.TemporaryDirectory(prefix="clinrl-bench-") as folder,
        listening(Path(folder)) as (version, url),
        openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client,
    ):

        def ask(number: int, thinking: bool) -> tuple[float, int]:
            started = time.perf_counter()
            body = {"chat_template_kwargs": {"enable_thinking": thinking}}
            answer = client.chat.completions.create(model="bench", messages=prompts[number], extra_body=body)  # type: ignore[arg-type]
            return time.perf_counter() - started, answer.usage.completion_tokens  # type: ignore[union-attr]

        for name, mode in version.served.modes.items():
            ask(0, mode.thinking)  # warms up
            for clients in CLIENTS:
                with ThreadPoolExecutor(clients) as pool:
                    started = time.perf_counter()
                    found = [*pool.map(lambda number: ask(number, mode.thinking), range(REQUESTS))]  # noqa: B023
                    took = time.perf_counter() - started
                waits, tokens = [wait for wait, _ in found], sum(count for _, count in found) / REQUESTS
                what = f"served, mode {name}, {clients} client{'s' * (clients > 1)}"
                rows.append((what, round(REQUESTS / took, 2), "requests/s", f"{tokens:.0f} tokens an answer"))
                rows.append((f"{what}, half", round(median(waits), 3), "s", "wait for an answer"))
                late = quantiles(waits, n=20, method="inclusive")[-1]
                rows.append((f"{what}, 95%", round(late, 3), "s", "wait for an answer"))
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
