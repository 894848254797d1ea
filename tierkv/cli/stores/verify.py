"""``tierkv verify``: read and check every chunk, and remove damaged ones."""

from __future__ import annotations

import click

from tierkv.cli.stores.output import Report, counted, fields_of, progress
from tierkv.cli.stores.target import PlaceChoice, chunk_filter, find_target, not_opened, place_options, tenant_option
from tierkv.errors import TierKVError
from tierkv.stores.store import Store
from tierkv.stores.verification import Verified, verify_store
from tierkv.types.keys import Tenant


@click.command()
@click.argument("place")
@click.option(
    "--repair", is_flag=True, help="Remove damaged chunks. Without it nothing is changed. Needs the tier for itself."
)
@tenant_option
@place_options
@click.pass_context
def verify(  # noqa: PLR0913 - click passes each option
    ctx: click.Context,
    *,
    place: str,
    repair: bool,
    tenant: Tenant | None,
    choice: PlaceChoice,
    as_json: bool,
) -> None:
    """Read every chunk at PLACE and check it: header, namespace, key, lengths, checksums.

    No codec is opened, so encrypted chunks are checked without their key. A damaged chunk costs an engine nothing but a
    miss: it refuses the chunk, and computes it again. Without --repair it runs beside an engine. An export
    folder is compared with its manifest too: chunks that it lacks, an export that was interrupted. Exit code 0: all
    chunks are whole; 1: something was found (also if it was repaired).

    \b
    Examples:
      tierkv verify stack.toml
      tierkv verify /var/cache/tierkv --repair
      tierkv verify s3://bucket/kv -n llama-3-8b --json
    """  # noqa: D301  click reads the control character, and does not wrap the rest
    target = find_target(place, choice)
    report = Report(as_json=as_json)
    report.add(target.findings)
    sums = Verified()
    with progress("verifying") as advance:
        for at, stored in target.stores:
            try:
                with Store(at, stored.namespace, writes=repair, is_upkeep=True) as store:
                    chosen = chunk_filter(tenant)
                    report.add(verify_store(store, sums, chosen=chosen, repair=repair, progress=advance))
            except TierKVError as error:
                report.add([not_opened(at, stored, error)])
    findings = f"{report.findings} finding{'' if report.findings == 1 else 's'}"
    sentence = f"{counted(sums.chunks, sums.frame_bytes)} whole, {findings}, {sums.removed} removed"
    report.end(ctx, sentence, place=place, **fields_of(sums))
