"""JSON of strangers: a value of the expected form, or a phrase about what is not."""

import pytest

from fedjax_pfl import json_text

KIND = {
    "name": str,
    "count?": int,
    "rows": [{"round": int, str: json_text.NUMBER_OR_NULL}],
    "sizes?": {"a": json_text.NUMBER, str: json_text.NOTHING},
}


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "x", "rows": []}',
        '{"name": "x", "rows": [{"round": 1, "loss": 0.5, "auc": null}], "more": [[]]}',
        b'{"name": "x", "rows": [], "count": 3, "sizes": {"a": 1}}',
    ],
)
def test_forms_that_fit(text):
    """Optional names may be missing, and others are not looked at."""
    assert json_text.read(text, KIND)["name"] == "x"


@pytest.mark.parametrize(
    "text, phrase",
    [
        ("", "it is not JSON"),
        ("[" * 10**5, "it is not JSON"),
        (b"\xff", "it is not JSON"),
        ("9" * 5000, "it is not JSON"),
        ("[]", "it is a list, an object is expected"),
        ('{"rows": []}', "it has no name"),
        ('{"name": 5, "rows": []}', "its name is an integer, a text is expected"),
        ('{"name": "x", "rows": {}}', "its rows is an object, a list is expected"),
        ('{"name": "x", "rows": [{}]}', r"it has no rows\[0\]\.round"),
        (
            '{"name": "x", "rows": [{"round": true}]}',
            r"its rows\[0\]\.round is true or false, an integer is expected",
        ),
        (
            '{"name": "x", "rows": [{"round": 1, "loss": "y"}]}',
            r"its rows\[0\]\.loss is a text, a number or null is expected",
        ),
        ('{"name": "x", "rows": [], "count": null}', "its count is null, an integer"),
        (
            '{"name": "x", "rows": [], "sizes": {"a": 1, "b\\u0007": 2}}',
            r"its sizes has b\?, which is not expected",
        ),
    ],
)
def test_forms_that_do_not_fit(text, phrase):
    """One line, whatever the text holds."""
    with pytest.raises(ValueError, match=f"^{phrase}") as error:
        json_text.read(text, KIND)
    assert "\n" not in str(error.value)
