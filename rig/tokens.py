"""Who asks Google: access tokens from the environment, from application default credentials, from gcloud, or from a VM's metadata server.

Knows no service. A token is never in an error, a repr or a command line. google-auth is needed for application default
credentials only, so that the VM, which has the metadata server, does without it.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

if TYPE_CHECKING:
    from collections.abc import Callable

    from google.auth.credentials import Credentials

    from rig.google import Tokens

SCOPE = "https://www.googleapis.com/auth/cloud-platform"
GIVEN = "GOOGLE_OAUTH_ACCESS_TOKEN"
KEY_FILE = "GOOGLE_APPLICATION_CREDENTIALS"
WHAT_TO_DO = (
    "run `gcloud auth application-default login`, or `gcloud auth login` where gcloud may be asked for tokens, "
    f"or set {KEY_FILE} to a service account's key file"
)
# One refresh, one run of gcloud, one answer of the metadata server.
REFRESH_SECONDS, GCLOUD_SECONDS, METADATA_SECONDS = 20.0, 60.0, 5.0
# A token is not used in its last minute.
MARGIN_SECONDS = 60.0


class TokenError(RuntimeError):
    """Nobody is signed in, or no token can be had; the text says how to sign in."""


def found() -> Tokens:
    """The first of: the environment's token, application default credentials, gcloud's account, the account of the VM this runs on.

    Raises:
        TokenError: there is none of them.
    """
    if given := os.environ.get(GIVEN):
        return GivenToken(given)
    if (file := _key_file()) is not None:
        return DefaultCredentials(file)
    if gcloud := shutil.which("gcloud"):
        account = GcloudTokens(gcloud)
        try:
            account.token()
        except TokenError:
            # gcloud is there and nobody is signed in with it; a VM of Google's still has an account.
            if not _on_google():
                raise
        else:
            return account
    if _on_google():
        return MetadataTokens()
    raise TokenError(
        f"expected somebody signed in to Google Cloud, found neither application default credentials nor gcloud; {WHAT_TO_DO}"
    )


class GivenToken:
    """The token that the environment has."""

    who = f"the token in {GIVEN}"

    def __init__(self, token: str) -> None:
        self._token = token

    def token(self, *, fresh: bool = False) -> str:
        """The token.

        Raises:
            TokenError: it was refused, and there is no other.
        """
        if fresh:
            raise TokenError(
                f"expected a valid token in {GIVEN}, found one that was refused; set a new one, or unset it and {WHAT_TO_DO}"
            )
        return self._token


class DefaultCredentials:
    """google-auth's: a service account's key, a user's sign-in, or another company's identity, whichever the file has."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._credentials = self._loaded()
        self._ask = _quick_request()

    @property
    def who(self) -> str:
        """Whose."""
        names = ("service_account_email", "account")
        account = next((name for key in names if (name := self._fact(key))), "a user")
        return f"{account} (application default credentials)"

    @property
    def quota_project(self) -> str | None:
        """What a user's calls are counted for; a service account's are for its own project."""
        return self._fact("quota_project_id")

    def token(self, *, fresh: bool = False) -> str:
        """A token, renewed when it has ended.

        Raises:
            TokenError: it cannot be renewed.
        """
        from google.auth.exceptions import GoogleAuthError

        if fresh or not self._credentials.valid:
            try:
                self._credentials.refresh(self._ask)  # type: ignore[no-untyped-call]
            except GoogleAuthError as error:
                raise TokenError(
                    f"expected a token for {self.who} from {self._file}, found {_told(error)}; {WHAT_TO_DO}"
                ) from error
        return str(self._credentials.token)

    def _loaded(self) -> Credentials:
        import google.auth
        from google.auth.exceptions import GoogleAuthError

        try:
            with warnings.catch_warnings():
                # That a user's sign-in has no quota project; the service says so itself where it matters (rig/errors.py).
                warnings.simplefilter("ignore", UserWarning)
                credentials, _ = google.auth.default(scopes=[SCOPE])
        except (GoogleAuthError, OSError) as error:
            raise TokenError(
                f"expected credentials in {self._file}, found {_told(error)}; {WHAT_TO_DO}"
            ) from error
        return credentials

    def _fact(self, name: str) -> str | None:
        value = getattr(self._credentials, name, None)
        return value if isinstance(value, str) and value else None


class GcloudTokens:
    """Of the account that gcloud is signed in with."""

    who = "gcloud's account"

    def __init__(self, gcloud: str) -> None:
        self._gcloud = gcloud
        self._last: str | None = None

    def token(self, *, fresh: bool = False) -> str:
        """A token.

        Raises:
            TokenError: gcloud has none to give.
        """
        if fresh:
            # print-access-token gives what it has until that is about to end; this one always asks.
            self._last = self._run(
                "config", "config-helper", "--force-auth-refresh",
                "--format=value(credential.access_token)",
            )  # fmt: skip
        elif self._last is None:
            self._last = self._run("auth", "print-access-token")
        return self._last

    def _run(self, *arguments: str) -> str:
        command = f"gcloud {' '.join(arguments[:2])}"
        environment = {**os.environ, "CLOUDSDK_CORE_DISABLE_PROMPTS": "1"}
        try:
            done = subprocess.run(
                [self._gcloud, *arguments],
                env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=GCLOUD_SECONDS, check=False,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            # Its text is chosen here: a TimeoutExpired holds what was printed.
            raise TokenError(
                f"expected a token from `{command}`, found {type(error).__name__}; {WHAT_TO_DO}"
            ) from error
        token = done.stdout.strip()
        if done.returncode != 0 or not token:
            said = " ".join(done.stderr.split())[:300] or f"status {done.returncode}"
            raise TokenError(f"expected a token from `{command}`, found: {said}; {WHAT_TO_DO}")
        return token


class MetadataTokens:
    """Of a VM's own account, on that VM. Its server renews them by itself."""

    who = "the VM's service account"

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last, self._good_until = "", float("-inf")

    def token(self, *, fresh: bool = False) -> str:
        """A token.

        Raises:
            TokenError: the metadata server has none, or there is no such server.
        """
        if fresh or self._clock() >= self._good_until:
            answer = self._asked()
            self._last = str(answer["access_token"])
            self._good_until = self._clock() + float(answer["expires_in"]) - MARGIN_SECONDS
        return self._last

    def _asked(self) -> dict[str, Any]:
        host = metadata_host()
        try:
            answer = httpx.get(
                f"http://{host}/computeMetadata/v1/instance/service-accounts/default/token",
                headers={"Metadata-Flavor": "Google"},
                timeout=METADATA_SECONDS,
                # A proxy has another VM's account, or none.
                trust_env=False,
            )
        except httpx.TransportError as error:
            raise TokenError(
                f"expected a token from the metadata server {host}, found {error!r}; this is for a VM of Google Cloud"
            ) from error
        if answer.status_code == httpx.codes.NOT_FOUND:
            raise TokenError(
                "expected the VM to have a service account, found none; set SERVICE_ACCOUNT and create the VM again"
            )
        try:
            found = answer.raise_for_status().json()
            return {"access_token": found["access_token"], "expires_in": found["expires_in"]}
        except (httpx.HTTPStatusError, ValueError, KeyError, TypeError) as error:
            raise TokenError(
                f"expected a token from the metadata server {host}, found HTTP {answer.status_code} without one"
            ) from error


def metadata_host() -> str:
    """Where a VM's metadata server is; GCE_METADATA_HOST says otherwise."""
    return os.environ.get("GCE_METADATA_HOST") or "metadata.google.internal"


def _key_file() -> Path | None:
    """Where application default credentials are, if they are: looked up here, since google-auth would wait for a metadata server next."""
    if named := os.environ.get(KEY_FILE):
        return Path(named)
    config = os.environ.get("CLOUDSDK_CONFIG")
    if config is None and os.name == "nt":
        config = f"{os.environ.get('APPDATA', '')}\\gcloud"
    folder = Path(config) if config else Path.home() / ".config" / "gcloud"
    file = folder / "application_default_credentials.json"
    return file if file.is_file() else None


def _on_google() -> bool:
    """This machine is a VM of Google's: its firmware says so, or the environment names a metadata server."""
    if os.environ.get("GCE_METADATA_HOST"):
        return True
    product = Path("/sys/class/dmi/id/product_name")
    try:
        return product.read_text().startswith("Google")
    except OSError:
        # No Linux, or no firmware to read.
        return False


def _quick_request() -> Any:
    from google.auth.transport.requests import Request

    return functools.partial(Request(), timeout=REFRESH_SECONDS)


def _told(error: Exception) -> str:
    """The first words of google-auth's error: further arguments hold the endpoint's whole answer."""
    return str(error.args[0] if error.args else type(error).__name__)[:300]
