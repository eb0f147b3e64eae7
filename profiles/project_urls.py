"""The project's addresses. They come from `[project.urls]` in `pyproject.toml`."""


def issues_url() -> str:
    """The address for bug reports. If it is unknown, returns "the project's issue tracker"."""
    # Imported late: it parses e-mail headers, which takes 30 ms on a small board.
    from importlib.metadata import PackageNotFoundError, metadata

    try:
        links = metadata("edgetailor").get_all("Project-URL", [])
    except PackageNotFoundError:
        links = []
    urls: dict[str, str] = dict(link.split(", ", 1) for link in links)
    return urls.get("Issues", "the project's issue tracker")
