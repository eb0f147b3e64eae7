"""What a person sees holds still: nothing moves by itself, and little is drawn."""

from pathlib import Path

import pytest

from gate_proxy import gate
from phones import KEEP_VIEWS, Phone, fleet, samples, token, with_timers

pytestmark = pytest.mark.web

OBSERVE = """
window.shifts = [];
new PerformanceObserver((list) => {
  for (const shift of list.getEntries()) {
    const where = shift.sources.map(({ node }) => node?.id || node?.nodeName);
    if (!shift.hadRecentInput) window.shifts.push([shift.value, window.view?.stage, ...where]);
  }
}).observe({ type: "layout-shift", buffered: true });
addEventListener("DOMContentLoaded", () => {
  window.drawn = [];
  window.repeated = [];
  let last = "";
  new MutationObserver(() => {
    const facts = document.getElementById("facts").innerText;
    if (facts === last) window.repeated.push(facts);
    last = facts;
  }).observe(document.getElementById("facts"), { childList: true, subtree: true });
  new MutationObserver(() => window.drawn.push(performance.now())).observe(
    document.getElementById("progress"), { attributes: true, attributeFilter: ["value"] });
});
"""
MOST = 0.1
"""What https://web.dev/articles/cls calls good, for a part of a page's life; here for all of it."""
MOST_A_SECOND = 5


def test_a_whole_life(browser, serve, tmp_path: Path, seed: int) -> None:
    """In German, whose lines are the longest."""
    data = samples(tmp_path, seed, 0, 600)
    shifts, drawn = [], []
    served = serve(*fleet(tmp_path / "c", rounds=3), page=with_timers(0.2))
    with served as server, gate(server.url) as (url, network):
        context = browser.new_context(viewport={"width": 360, "height": 740}, locale="de")
        page = context.new_page()
        page.add_init_script(KEEP_VIEWS + OBSERVE)
        page.goto(f"{url}/join/#{token(server, 'phone')}")
        phone = Phone(page)
        page.locator("#join button").click()
        phone.wait_for("joined")
        page.locator("#npz").set_input_files(str(data))
        page.locator("#train").click()
        phone.wait_for("training")
        network.state = "refuse"
        page.locator("#pause").click()
        phone.wait_for("paused")
        page.locator("#pause").click()
        phone.wait_for_problem("client.away")
        page.locator("#retry-now").wait_for()
        network.state = "open"
        phone.wait_for("training")
        shifts += page.evaluate("shifts")
        drawn.append(page.evaluate("drawn"))
        page.reload()
        phone.wait_for("finished")
        page.wait_for_timeout(500)
        shifts += page.evaluate("shifts")
        drawn.append(page.evaluate("drawn"))
        assert page.evaluate("repeated") == []
    assert sum(value for value, *_ in shifts) < MOST, shifts
    for times in drawn:
        for index, begun in enumerate(times):
            assert sum(0 <= time - begun < 1000 for time in times[index:]) <= MOST_A_SECOND
    assert sum(map(len, drawn)) > 3
