"""The slots in which runs train and decide, of the Prefect server's concurrency limits.

Prefect does not notice that a slot's holder was killed. So a run is tagged with the lease of its slot, and whoever
waits for a slot frees those of the dead.
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import httpx
from prefect import get_client
from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate, GlobalConcurrencyLimitUpdate
from prefect.concurrency.context import ConcurrencyContext
from prefect.concurrency.sync import concurrency
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound
from prefect.logging import get_run_logger

from flows import runs

TRAINING = f"clinrl-{os.environ.get('CLINRL_SLOT') or 'training'}"
"""The concurrency limit that training, examining and merging share. Raise it on a machine that has room for two.

Workers that share a Prefect server and no machine, or one machine and no GPU, each name a slot of their own in
CLINRL_SLOT, such as cpu-of-ward or gpu-0."""
LEASE_S = 86400.0
"""Seconds until the server frees a slot whose holder is silent: Prefect's longest. It renews a lease after 18 hours,
and never again if that fails. `sweep`, `lost_workers` and whoever waits for a slot free those of the dead earlier."""
WAIT_S = 60.0
"""Seconds that a run waits for a slot before it looks whether the slot's holder lives."""
UNTAGGED_S = 120.0
"""Seconds that a run may take from its slot to the tag with its lease."""


@contextmanager
def hold(name: str) -> Iterator[None]:
    """Wait for a slot of a limit, and hold it until the block ends. A limit has one slot unless somebody raised it.

    A deployment's own limit does not do: Prefect takes its slot back, which ends the flow, while a person is asked, and
    when the server is away for four minutes.
    """
    with get_client(sync_client=True) as client:
        try:
            limit = client.read_global_concurrency_limit_by_name(name)
        except ObjectNotFound:
            with suppress(ObjectAlreadyExists):  # another run may be quicker
                client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name=name, limit=1))
            limit = client.read_global_concurrency_limit_by_name(name)
        if limit.active_slots >= limit.limit:
            get_run_logger().info("another run holds the limit %s; waiting for its slot", name)
        with ExitStack() as held:
            held.callback(_untag, client, runs.LEASE.format(name))
            while True:
                with suppress(TimeoutError):
                    taken = concurrency(
                        name, timeout_seconds=WAIT_S, lease_duration=LEASE_S, strict=True,
                        raise_on_lease_renewal_failure=False,  # an absence of the server must not end hours of training
                    )  # fmt: skip
                    held.enter_context(taken)
                    break
                _free_slots(client, name)  # who holds it may have died meanwhile
            context = ConcurrencyContext.get()
            leases = context.cleanup_lease_ids if context else []
            runs.retag(client, *(f"{runs.LEASE.format(name)}{lease}" for lease in leases[-1:]))
            yield


def _free_slots(client: Any, name: str) -> None:
    """Free a limit's slots that no living run is tagged with: the run that took one was killed before it was tagged
    with its lease, or the server before it wrote the lease down, which then never ends."""
    runs.sweep(client)
    held = sum(any(tag.startswith(runs.LEASE.format(name)) for tag in run.tags) for run in runs.unfinished(client))
    limit, now = client.read_global_concurrency_limit_by_name(name), runs.now_of(client)
    if limit.active_slots > held and (now - limit.updated).total_seconds() > UNTAGGED_S:
        client.update_global_concurrency_limit(name, GlobalConcurrencyLimitUpdate(active_slots=held))


def _untag(client: Any, kind: str) -> None:
    """Remove the tag of a slot that was given back: a run that waits for its next one holds none."""
    with suppress(httpx.HTTPError):  # the server is away
        runs.retag(client, kind)
