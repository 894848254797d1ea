"""Lifecycle rules of a bucket, which remove old chunks, as far as they can be queried."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from tierkv.abc import CheckResult
from tierkv_fsspec.failures import Failure
from tierkv_fsspec.options import FsspecOptions, Location

NO_RULE = (
    "no rule removes old chunks below {place}: the bucket grows without bound unless another program removes them; "
    "see Lifecycle in the README of tierkv-fsspec"
)
NO_RULE_FIX = "set a lifecycle rule that expires objects below the tier's prefix"


def check_lifecycle(location: Location, options: FsspecOptions) -> CheckResult:
    """Report whether an enabled rule expires objects below ``location``. Never a failure: another program may do it.

    The rules are queried through botocore, a dependency of s3fs and boto3; obstore cannot query them.
    """
    place = f"{location.bucket}/{location.prefix}"
    try:
        rules = _rules(location.bucket, options)
    except ImportError:
        return CheckResult("lifecycle", ok=True, detail="not known: install boto3 to have the bucket's rules checked")
    except Exception as error:  # noqa: BLE001  the check reports any error of the library
        failure = Failure.of(error)
        if "NoSuchLifecycleConfiguration" in failure.detail:
            return CheckResult("lifecycle", ok=True, detail=NO_RULE.format(place=place), fix=NO_RULE_FIX, warns=True)
        return CheckResult("lifecycle", ok=True, detail=f"not known: {failure.kind.value} ({failure.detail})")
    days = [days for rule in rules if (days := _days(rule, location.prefix, options.tags)) is not None]
    if not days:
        return CheckResult("lifecycle", ok=True, detail=NO_RULE.format(place=place), fix=NO_RULE_FIX, warns=True)
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
    """Days after which the rule removes every chunk below ``prefix``; None if it does not."""
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
