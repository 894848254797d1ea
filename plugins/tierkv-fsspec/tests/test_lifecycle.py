"""``tierkv check`` on the lifecycle rules of a bucket, with a server that stores them."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from fsspec_support import S3Server, check

EXPIRES = {"Expiration": {"Days": 7}}


def lifecycle_detail(s3: S3Server, url: str, rule: dict[str, Any] | None, **options: Any) -> str:
    """Check result with one rule in the bucket or none. It never prevents a start."""
    if rule is not None:
        rules = {"Rules": [{"ID": "rule", "Status": "Enabled", **rule}]}
        s3.client.put_bucket_lifecycle_configuration(Bucket=url.split("/")[2], LifecycleConfiguration=rules)
    check_result = check(url, endpoint_url=s3.endpoint, **options)["lifecycle"]
    assert check_result.ok
    return check_result.detail


@pytest.mark.parametrize(
    ("rule", "options"),
    [
        ({"Filter": {"Prefix": "pre/fix/"}, **EXPIRES}, {}),
        ({"Filter": {"Prefix": "pre"}, **EXPIRES}, {}),
        ({"Filter": {"Prefix": ""}, **EXPIRES}, {}),
        ({"Filter": {"Tag": {"Key": "kind", "Value": "kv"}}, **EXPIRES}, {"tags": {"kind": "kv", "x": "y"}}),
        (
            {"Filter": {"And": {"Prefix": "pre/", "Tags": [{"Key": "kind", "Value": "kv"}]}}, **EXPIRES},
            {"tags": {"kind": "kv"}},
        ),
    ],
)
def test_rule_that_removes_old_chunks(s3: S3Server, url: str, rule: dict[str, Any], options: dict[str, Any]) -> None:
    """The author of a rule needs to know that it covers the tier, and after how many days."""
    assert "after 7 days" in lifecycle_detail(s3, url, rule, **options)


@pytest.mark.parametrize(
    ("rule", "options"),
    [
        (None, {}),
        ({"Filter": {"Prefix": "elsewhere/"}, **EXPIRES}, {}),
        ({"Filter": {"Prefix": "pre/fix/deeper/"}, **EXPIRES}, {}),
        ({"Filter": {"Prefix": "pre/"}, **EXPIRES, "Status": "Disabled"}, {}),
        ({"Filter": {"Prefix": "pre/"}, "Transitions": [{"Days": 30, "StorageClass": "GLACIER"}]}, {}),
        ({"Filter": {"Tag": {"Key": "kind", "Value": "kv"}}, **EXPIRES}, {}),
        ({"Filter": {"Tag": {"Key": "kind", "Value": "kv"}}, **EXPIRES}, {"tags": {"kind": "other"}}),
    ],
)
def test_bucket_that_grows_without_bound(
    s3: S3Server, url: str, rule: dict[str, Any] | None, options: dict[str, Any]
) -> None:
    """The cost of a cache is easily overlooked: a rule that does not cover the tier must not seem to cover it."""
    text = lifecycle_detail(s3, url, rule, **options)
    assert "no rule removes old chunks" in text
    assert "grows without bound" in text


def test_rules_that_cannot_be_queried(s3: S3Server, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading the rules needs another permission than using the bucket, and it needs botocore."""
    s3.refuse[f"/{url.split('/')[2]}?lifecycle"] = "403 Forbidden"
    try:
        assert lifecycle_detail(s3, url, None).startswith("not known: access is refused")
    finally:
        s3.refuse.clear()
    monkeypatch.setitem(sys.modules, "botocore", None)
    assert "install boto3" in lifecycle_detail(s3, url, None)
