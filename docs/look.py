"""Pictures of the built pages, to look at: `python docs/look.py SITE OUT [CHROMIUM]`.

Each page is shown 360 and 1200 pixels wide, light and dark. Pages that are wider than that are
named. Needs `pip install playwright`, and the path of a Chromium unless playwright has its own.
"""

import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

site, out = Path(sys.argv[1]).resolve(), Path(sys.argv[2])
pages = [p for p in sorted(site.rglob("*.html")) if not p.name.startswith(("genindex", "search"))]
with sync_playwright() as playwright:
    path = sys.argv[3] if len(sys.argv) > 3 else None
    browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
    for width in (360, 1200):
        for scheme in ("light", "dark"):
            size = {"width": width, "height": 800}
            tab = browser.new_context(viewport=size, color_scheme=scheme).new_page()
            for page in pages:
                tab.goto(page.as_uri())
                picture = out / page.relative_to(site).with_suffix(f".{width}.{scheme}.png")
                tab.screenshot(path=picture, full_page=True)
                if tab.evaluate("document.documentElement.scrollWidth") > width:
                    print(f"{page.name} is wider than {width} pixels")
    browser.close()
