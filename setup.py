"""Add to setup.cfg what derives from the URL of the repository."""

import re
from pathlib import Path

from setuptools import setup

# The one place; CITATION.cff repeats it, and tools/release_check.py compares the two.
REPOSITORY = "https://github.com/tfdp/tfdp"

ROOT = Path(__file__).resolve().parent
VERSION = re.compile(r'^__version__ = "(.+)"$', re.M)
# A path such as `docs/faults.md`, not a URL nor an anchor; code is left as it is.
RELATIVE = re.compile(
    r"(?ms)^```.*?^```"
    r'|(?P<before>\]\(|\b(?:href|src|srcset)=")(?!#|\w+:)(?P<path>[^)"\s]+)'
)
IMAGES = (".gif", ".jpg", ".png", ".svg")


def with_absolute_links(text: str, version: str) -> str:
    """Point links and images of README to the repository, as of the version's tag.

    Args:
        text: String, Markdown.
        version: String, such as `"0.1.0"`.

    Returns:
        String.
    """

    def absolute(link: re.Match[str]) -> str:
        if link["path"] is None:
            return link[0]
        view = "raw" if link["path"].endswith(IMAGES) else "blob"
        return f"{link['before']}{REPOSITORY}/{view}/v{version}/{link['path']}"

    return RELATIVE.sub(absolute, text)


def published_readme() -> str:
    """Return README as PyPI shows it."""
    source = (ROOT / "tfdp" / "__init__.py").read_text("utf-8")
    (version,) = VERSION.findall(source)
    return with_absolute_links((ROOT / "README.md").read_text("utf-8"), version)


setup(
    long_description=published_readme(),
    long_description_content_type="text/markdown",
    project_urls={
        "Homepage": REPOSITORY,
        "Documentation": f"{REPOSITORY}/blob/HEAD/docs/index.md",
        "Source": REPOSITORY,
        "Changelog": f"{REPOSITORY}/blob/HEAD/CHANGELOG.md",
        "Issues": f"{REPOSITORY}/issues",
    },
)
