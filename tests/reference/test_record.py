"""The reader of API pages, on a small page in each of the four formats."""

from __future__ import annotations

import pytest

from .record import read_page

MARKDOWN = """## Class MyStrategy
[Strategy](https://example.org/Strategy)Inherits From: 

### Aliases:
- Class `tf.old.MyStrategy`
## __init__


```
 __init__(mode=tf.Mode.AUTO)
```
Possible values include `AUTO` and `OFF`.
## Properties
### size

How many.
## Methods
### run
[View source](https://example.org/r2.0)


```
 run(
    fn,
    args=(),
    kwargs=None
)
```

```
 result = strategy.run(fn, args=(1,))
```
### scope

```
 scope()
```
"""

TABLES = """# tf.old.MyStrategy

Inherits From: `Strategy`

    
    tf.old.MyStrategy(
        mode=tf.Mode.AUTO
    )
    
Possible values include `AUTO` and `OFF`.

Args  
---  
`mode` |  How.   
Attributes  
---  
`size` |  How many.   
## Methods

### `run`

View source

    
    run(
        fn, args=(), kwargs=None
    )
    
    result = strategy.run(fn, args=(1,))
    
Args  
---  
`fn` |  What.   
### `scope`

    
    scope()
    
"""

HTML = """# tf.old.MyStrategy

Inherits From: [`Strategy`](../Strategy)

Possible values include `AUTO` and `OFF`.

<h2 id="__init__"><code>__init__</code></h2>

``` python
__init__(mode=tf.Mode.AUTO)
```

## Properties

<h3 id="size"><code>size</code></h3>

## Methods

<h3 id="run"><code>run</code></h3>

``` python
run(
    fn,
    args=(),
    kwargs=None
)
```

```python
result = strategy.run(fn, args=(1,))
```

<h3 id="scope"><code>scope</code></h3>

``` python
scope()
```
"""

RUN_ON = """Inherits From: Strategy
tf.old.MyStrategy(
    mode=tf.Mode.AUTO
)
Possible values include `AUTO` and `OFF`.
mode: how.size:   How many.runrun(
    fn, args=(), kwargs=None
)
result = strategy.run(fn, args=(1,))
fn: what.A result.
scopescope()
A context manager.
"""


@pytest.mark.parametrize("text", [MARKDOWN, TABLES, HTML, RUN_ON])
def test_all_formats_say_the_same(text: str) -> None:
    page = read_page(text)
    assert page["class"] == "tf.old.MyStrategy"
    assert page["base"] == "Strategy"
    assert page["constructor"] == "mode=tf.Mode.AUTO"
    assert page["properties"] == ["size"]
    assert page["methods"] == {"run": "fn, args=(), kwargs=None", "scope": ""}
    assert page["names"] == ["tf.Mode.AUTO", "tf.old.MyStrategy"]
    assert page["members"] == ["strategy.run"]
    assert page["values"] == ["AUTO", "OFF"]


def test_results_of_a_loop_are_members_of_its_context() -> None:
    text = """# tf.old.MyStrategy

Inherits From: [`Strategy`](../Strategy)

<h3 id="steps"><code>steps</code></h3>

Returns the `MultiStepContext` object which has the following properties:
  - run_op: Runs it.

<h3 id="map"><code>map</code></h3>

* <b>`**kwargs`</b>: `"quickly"`: whether to hurry.
"""
    page = read_page(text)
    assert page["types"] == ["MultiStepContext"]
    assert page["members"] == ["context.run_op"]
    assert page["keywords"] == ["quickly"]


def test_a_page_without_a_class_is_an_error() -> None:
    with pytest.raises(AssertionError, match="which class"):
        read_page("Nothing to see here.")
