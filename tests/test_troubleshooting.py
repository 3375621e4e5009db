"""The troubleshooting page is what the doctor's catalogue makes of it today."""

from pathlib import Path

from colabtpu.catalogue import ENTRIES
from colabtpu.symptoms import SYMPTOMS
from colabtpu.troubleshooting import page

PAGE = Path(__file__).parents[1] / "docs/troubleshooting.md"


def test_the_page_is_up_to_date():
    assert PAGE.read_text() == page(), (
        "python -m colabtpu.troubleshooting > docs/troubleshooting.md"
    )


def test_every_entry_is_on_the_page_with_its_next_step():
    text = PAGE.read_text().replace("\\", "")
    for symptom in SYMPTOMS:
        assert symptom.shows in text
        assert symptom.fix in text
    for entry in ENTRIES:
        assert f"#### {entry.code}\n" in text
        assert entry.fix in text
    assert "{seen" not in text
