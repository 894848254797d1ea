"""Who removes old chunks from a bucket: its lifecycle rules, as far as they may be asked for."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from tierkv.abc import CheckResult
from tierkv_fsspec.options import FsspecOptions, Location
from tierkv_fsspec.troubles import Trouble

NOBODY = (
    "no rule removes old chunks below {place}: the bucket grows for ever unless something else removes them; "
    "see Lifecycle in the README of tierkv-fsspec"
)


def check_lifecycle(location: Location, options: FsspecOptions) -> CheckResult:
    """Whether an enabled rule lets objects below ``location`` expire. Never a failure: it may be somebody else's job.

    Rules are told by botocore, which comes with s3fs and boto3; obstore cannot ask.
    """
    place = f"{location.bucket}/{location.prefix}"
    try:
        rules = _rules(location.bucket, options)
    except ImportError:
        return CheckResult("lifecycle", ok=True, detail="not known: install boto3 to have the bucket's rules looked at")
    except Exception as error:  # noqa: BLE001  whatever the library raises is what the check is there to tell
        trouble = Trouble.of(error)
        if "NoSuchLifecycleConfiguration" in trouble.detail:
            return CheckResult("lifecycle", ok=True, detail=NOBODY.format(place=place))
        return CheckResult("lifecycle", ok=True, detail=f"not known: {trouble.kind.value} ({trouble.detail})")
    days = [days for rule in rules if (days := _days(rule, location.prefix, options.tags)) is not None]
    if not days:
        return CheckResult("lifecycle", ok=True, detail=NOBODY.format(place=place))
    return CheckResult("lifecycle", ok=True, detail=f"a rule removes chunks below {place} after {min(days)} days")


def _rules(bucket: str, options: FsspecOptions) -> Sequence[Mapping[str, Any]]:
    botocore = import_module("botocore")
    config_type = import_module("botocore.config").Config
    get_session = import_module("botocore.session").get_session

    config = config_type(
        connect_timeout=options.connect_timeout_s,
        read_timeout=options.read_timeout_s,
        retries={"max_attempts": 0},
        signature_version=botocore.UNSIGNED if options.storage_options.get("anon") else None,
    )
    region = options.region or os.environ.get("AWS_REGION")
    client = get_session().create_client("s3", region_name=region, endpoint_url=options.endpoint_url, config=config)
    try:
        rules: Sequence[Mapping[str, Any]] = client.get_bucket_lifecycle_configuration(Bucket=bucket)["Rules"]
    finally:
        client.close()
    return rules


def _days(rule: Mapping[str, Any], prefix: str, tags: Mapping[str, str]) -> int | None:
    """Days after which the rule removes every chunk below ``prefix``, or None where it does not."""
    days = rule.get("Expiration", {}).get("Days")
    if rule.get("Status") != "Enabled" or days is None:
        return None
    chosen = rule.get("Filter", {})
    conditions = chosen.get("And", chosen)
    covers = f"{prefix}/".startswith(conditions.get("Prefix", rule.get("Prefix", "")))
    wanted = [*conditions.get("Tags", ()), *([conditions["Tag"]] if "Tag" in conditions else ())]
    has_tags = all(tags.get(tag["Key"]) == tag["Value"] for tag in wanted)
    by_size = "ObjectSizeGreaterThan" in conditions or "ObjectSizeLessThan" in conditions
    return int(days) if covers and has_tags and not by_size else None
