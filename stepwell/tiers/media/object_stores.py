"""Object stores from their URLs: options, credentials, and what is said of those that refuse us."""

import os
import re
from datetime import timedelta
from typing import Any

from obstore.exceptions import BaseError
from obstore.store import AzureStore, GCSStore, S3Store

from stepwell.errors import ConfigError, StepwellError, TierError
from stepwell.tiers.media.urls import MediumUrl

__all__ = ["ERRORS", "doubts_the_length", "open_store", "refusal", "status_of", "words_of"]

ERRORS = (BaseError, OSError, NotImplementedError)
"""What a request of obstore raises; what is not there is a FileNotFoundError."""

_PARAMETERS = {
    "s3": ("endpoint", "region", "virtual_hosted"),
    "gs": ("endpoint",),
    "az": ("endpoint", "account"),
}
_WHERE = {"s3": "bucket", "gs": "bucket", "az": "container"}
_CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (and AWS_SESSION_TOKEN), or run where the "
    "machine or the pod has a role; profiles of ~/.aws are not read",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, or run where the machine has a service account",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or AZURE_CLIENT_ID, "
    "AZURE_CLIENT_SECRET and AZURE_TENANT_ID, or run where the machine has an identity",
}
_RETRIES = 3
_BACKOFF = {
    "init_backoff": timedelta(milliseconds=50),
    "max_backoff": timedelta(seconds=1),
    "base": 2,
}
_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>([^<]+)</Code>")
_MESSAGE = re.compile(r"<Message>([^<]+)</Message>")
_ADDRESS = re.compile(r"https?://\S+")
# Where a machine is asked for its role, when nothing else gives credentials.
_OF_THE_MACHINE = ("/latest/api/", "/latest/meta-data", "computeMetadata", "/metadata/identity")
_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound", "bucket does not exist")
_OTHER_REGION = ("AuthorizationHeaderMalformed", "PermanentRedirect", "without LOCATION")
_EXPIRED = ("ExpiredToken", "InvalidToken", "TokenRefreshRequired")
_MOMENTARY = (408, 409, 425, 429)
_NO_SUCH_RANGE = 416
# What obstore says of an answer with another range than was asked for, or with all of the object.
_OTHER_RANGE = ("non-partial response", "Requested ")
_MOST_WORDS = 200


def open_store(url: MediumUrl, timeout_s: float) -> Any:
    """The store of obstore that a URL names; it is not asked yet.

    Credentials come from where obstore takes them, in this order. S3: AWS_ACCESS_KEY_ID,
    AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN; a web identity (AWS_WEB_IDENTITY_TOKEN_FILE and
    AWS_ROLE_ARN); a container's role, also EKS pod identity; the machine's role. Google: a service
    account or GOOGLE_APPLICATION_CREDENTIALS; gcloud's own; the machine's. Azure: account and key,
    a client's secret, a workload identity; the machine's. None are taken from the URL.

    Parameters: ``endpoint`` of a store that speaks like it, such as ``http://127.0.0.1:9000``; of
    S3 ``region`` (us-east-1) and ``virtual_hosted`` (true: the bucket is in the endpoint's name);
    of Azure ``account``.

    Args:
        url: see above.
        timeout_s: of one request. It is tried again within that time, and no longer.

    Raises:
        ConfigError: the URL is wrong, or credentials are half given.
    """
    url.check_parameters(_PARAMETERS[url.scheme])
    if not url.host:
        where = _WHERE[url.scheme]
        raise ConfigError(f"there is no {where}; write {url.scheme}://{where}: url={url.shown}")
    if url.user or url.password:
        raise ConfigError(
            f"credentials are not given in the url; set {_CREDENTIALS[url.scheme]}: url={url.shown}"
        )
    if url.port:
        raise ConfigError(
            f"what follows {url.scheme}:// is a {_WHERE[url.scheme]}, and a server is given as "
            f"?endpoint=http://host:{url.port}: url={url.shown}"
        )
    timeout = timedelta(seconds=timeout_s)
    endpoint = _endpoint(url)
    client: dict[str, Any] = {"timeout": timeout, "connect_timeout": timeout}
    if endpoint.startswith("http://"):
        client["allow_http"] = True
    options: dict[str, Any] = {
        "prefix": url.path.strip("/") or None,
        "client_options": client,
        "retry_config": {
            "max_retries": _RETRIES, "retry_timeout": timeout, "backoff": _BACKOFF,
        },
    }  # fmt: skip
    try:
        if url.scheme == "gs":
            return GCSStore(url.host, **options, **_google(endpoint))
        if url.scheme == "az":
            return AzureStore(url.host, **options, **_azure(url, endpoint))
        return S3Store(url.host, **options, **_s3(url, endpoint))
    except (*ERRORS, ValueError) as error:
        raise ConfigError(
            f"the store cannot be opened; set {_CREDENTIALS[url.scheme]}: url={url.shown} "
            f"error={words_of(error)}"
        ) from error


def _endpoint(url: MediumUrl) -> str:
    endpoint = url.parameters.get("endpoint", "")
    if "endpoint" in url.parameters and not re.match(r"https?://[^/@]+(/|$)", endpoint):
        # It is not quoted, since it may have a password in it.
        raise ConfigError(
            f"endpoint is such as https://minio:9000, without user or password: url={url.shown}"
        )
    return endpoint.rstrip("/")


def _s3(url: MediumUrl, endpoint: str) -> dict[str, Any]:
    options: dict[str, Any] = {
        "virtual_hosted_style_request": url.switch("virtual_hosted"),
        "disable_bulk_delete": True,  # not every store that speaks like S3 can
    }
    if "AWS_UNSIGNED_PAYLOAD" not in os.environ:
        # A record has a checksum of its own, and SHA-256 took two thirds of a write's CPU.
        options["unsigned_payload"] = True
    if endpoint:
        options["endpoint"] = endpoint
    if "region" in url.parameters:
        options["region"] = url.parameters["region"]
    return options


def _google(endpoint: str) -> dict[str, Any]:
    options: dict[str, Any] = {"base_url": endpoint} if endpoint else {}
    if endpoint.startswith("http://"):
        # An emulator: nobody is asked for credentials, and none are sent where anyone may listen.
        options["bearer_token"] = "none"
    return options


def _azure(url: MediumUrl, endpoint: str) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if endpoint:
        options["endpoint"] = endpoint
    if "account" in url.parameters:
        options["account_name"] = url.parameters["account"]
    return options


def refusal(error: BaseException, url: str, scheme: str) -> StepwellError:
    """What an error of the first requests means: a ConfigError, or a TierError if it may pass.

    Args:
        error: one of `ERRORS`.
        url: as it is shown.
        scheme: of the URL.
    """
    text, where = str(error), _WHERE[scheme]
    status = status_of(error)
    words = f"url={url} error={words_of(error)}"
    if any(mark in text for mark in _OF_THE_MACHINE):
        return ConfigError(
            f"there are no credentials, and this machine gives none; set {_CREDENTIALS[scheme]}: "
            f"{words}"
        )
    if any(mark in text for mark in _OTHER_REGION):
        return ConfigError(f"the {where} is in another region; give ?region=...: {words}")
    if isinstance(error, FileNotFoundError) or any(mark in text for mark in _NO_BUCKET):
        return ConfigError(f"there is no such {where}; make it first: {words}")
    if status in (401, 403) or any(mark in text for mark in _EXPIRED):
        return ConfigError(
            f"the store refuses us; it takes credentials that are valid and may get, put, delete "
            f"and list there: set {_CREDENTIALS[scheme]}: {words}"
        )
    if status is not None and 400 <= status < 500 and status not in _MOMENTARY:
        return ConfigError(f"the store does not take our requests: {words}")
    return TierError(f"the store does not answer: {words}")


def status_of(error: BaseException) -> int | None:
    """The HTTP status that an error of obstore tells of."""
    found = _STATUS.search(str(error))
    return int(found.group(1)) if found else None


def doubts_the_length(error: BaseException) -> bool:
    """Whether an error of asking for a part of an object may come from the object's length."""
    return status_of(error) == _NO_SUCH_RANGE or any(mark in str(error) for mark in _OTHER_RANGE)


def words_of(error: BaseException) -> str:
    """An error in one short line: the store's own words if it gave any, and no query string."""
    text = str(error).partition("Debug source")[0]
    code, message = _CODE.search(text), _MESSAGE.search(text)
    if code:
        text = code.group(1) + (f": {message.group(1)}" if message else "")
    else:
        text = text.rpartition(" - ")[2]  # before it: which request, how long, how often
    text = _ADDRESS.sub(lambda found: found.group().partition("?")[0], text)
    return " ".join(text.split())[:_MOST_WORDS] or type(error).__name__
