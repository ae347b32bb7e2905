"""One module for many layers: parameters are views of wherever a unit's image is."""

from typing import Any

import pytest
import torch

from megatrain.engine import compile as compile_module
from megatrain.engine.compile import OneGraph
from megatrain.engine.device_memory import CastBuffer, Region
from megatrain.engine.template import GradientViews, LayerTemplate, Slice, UnitLayout, cast_bytes
from megatrain.errors import ConfigError
from megatrain.models.decoder import Decoder
from support.layouts import fill, lay_out
from support.reference import build, config


@pytest.fixture
def setting() -> dict[str, Any]:
    stock = build("qwen2")
    decoder = Decoder.from_config(config("qwen2"))
    layout = lay_out(decoder, 1)
    region = Region(torch.zeros(2 * layout.image_bytes, dtype=torch.uint8))
    template = LayerTemplate(decoder, 1, layout, region)
    record = decoder.recorder.record(torch.zeros(2, 16, dtype=torch.int64))
    return {"stock": stock, "decoder": decoder, "layout": layout, "region": region, "t": template, "record": record}


def test_a_template_bound_to_an_image_computes_what_the_layer_computes(setting: dict[str, Any]) -> None:
    decoder, layout, region, template = (setting[k] for k in ("decoder", "layout", "region", "t"))
    hidden = torch.randn(2, 16, 64)
    for layer, image in ((0, 0), (3, layout.image_bytes), (1, 0)):
        stock = setting["stock"].model.layers[layer]
        fill(region, layout, image, stock, decoder.local_names(layer + 1))
        template.bind(image, layer + 1)
        args, kwargs = setting["record"].args[layer], setting["record"].kwargs[layer]
        assert torch.equal(template.call(args, kwargs)(hidden), stock(hidden, *args, **kwargs))
        assert template.module.self_attn.layer_idx == layer


def test_parameters_have_no_storage_of_their_own(setting: dict[str, Any]) -> None:
    template, region = setting["t"], setting["region"]
    template.bind(setting["layout"].image_bytes, 3)
    assert {p.untyped_storage()._cdata for p in template.module.parameters()} == {region.storage}
    before = [id(p) for p in template.module.parameters()]
    template.bind(0, 1)
    assert [id(p) for p in template.module.parameters()] == before
    assert all(p.device.type == "meta" for p in setting["decoder"].layers[0].parameters())


def test_a_tensor_stored_in_another_type_is_converted_when_it_is_bound() -> None:
    name = "mlp.up_proj.weight"
    stored = {f"model.layers.{i}.{name}": torch.bfloat16 for i in range(4)}
    decoder = Decoder.from_config(config(), freeze=["*up_proj*"], frozen_dtypes=stored)
    layout = lay_out(decoder, 1)
    region = Region(torch.zeros(layout.image_bytes, dtype=torch.uint8))
    casts = CastBuffer(cast_bytes(decoder), region.device)
    template = LayerTemplate(decoder, 1, layout, region, casts)
    cut = layout.slices[decoder.local_names(1)[name]]
    for value in (1.5, 2.5):
        casts.clear()
        region.view(cut.byte, cut.shape, torch.bfloat16).fill_(value)
        template.bind(0, 1)
        bound = template.module.get_parameter(name)
        assert bound.dtype == torch.float32
        assert not bound.requires_grad
        assert bool((bound == value).all())


def test_views_of_gradients_are_made_once_a_place() -> None:
    layout = UnitLayout(
        256, 1024, (Slice(0, 0, (3, 5), torch.float32, True), Slice(0, 512, (2,), torch.float32, False))
    )
    views = GradientViews(Region(torch.zeros(4096, dtype=torch.uint8)), layout, torch.bfloat16)
    first, frozen = views.at(512)
    assert frozen is None
    assert views.at(512)[0] is first
    first.fill_(2.0)
    assert float(views.flat(512).float().sum()) == 30.0
    assert float(views.flat(0).float().sum()) == 0.0


@pytest.fixture
def on_torch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.compile` traces as ever, and runs the graph without a code generator: seconds less, and no compiler."""
    torch._dynamo.reset()
    monkeypatch.setattr(compile_module, "backend", "aot_eager")


@pytest.mark.usefixtures("on_torch_alone")
def test_one_graph_serves_every_layer_and_the_callers_limit_stays(setting: dict[str, Any]) -> None:
    from torch._dynamo.utils import counters

    decoder, layout, region, record = (setting[k] for k in ("decoder", "layout", "region", "record"))
    compiled = LayerTemplate(decoder, 1, layout, region, compiled=True)
    hidden = torch.randn(2, 16, 64)
    limit = torch._dynamo.config.recompile_limit
    counters.clear()
    for layer in range(4):
        stock = setting["stock"].model.layers[layer]
        image = layer % 2 * layout.image_bytes
        fill(region, layout, image, stock, decoder.local_names(layer + 1))
        compiled.bind(image, layer + 1)
        args, kwargs = record.args[layer], record.kwargs[layer]
        assert torch.equal(compiled.call(args, kwargs)(hidden), stock(hidden, *args, **kwargs))
    assert counters["stats"]["unique_graphs"] == 1
    assert torch._dynamo.config.recompile_limit == limit


@pytest.mark.usefixtures("on_torch_alone")
def test_a_layer_that_breaks_the_graph_is_an_error_by_name_and_never_eager(setting: dict[str, Any]) -> None:
    decoder, layout, region, record = (setting[k] for k in ("decoder", "layout", "region", "record"))
    template = LayerTemplate(decoder, 1, layout, region, compiled=True)
    ran = []

    class Breaking(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch._dynamo.graph_break()
            ran.append(1)
            return x

    template.module.mlp = Breaking()
    template.bind(0, 1)
    call = template.call(record.args[0], record.kwargs[0])
    with pytest.raises(ConfigError, match=r"Qwen2DecoderLayer \(layers\.0\) cannot be compiled as one graph: .*"):
        call(torch.randn(2, 16, 64))
    assert not ran
    template.call(record.args[0], record.kwargs[0], compiled=False)(torch.randn(2, 16, 64))
    assert ran


@pytest.mark.usefixtures("on_torch_alone")
def test_a_layer_with_ever_new_graphs_is_an_error_and_never_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    class Counting(torch.nn.Module):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.calls if self.calls % 2 else x - self.calls

    monkeypatch.setattr(compile_module, "RECOMPILES", 12)
    module = Counting()
    compiled = OneGraph(module, "Counting")

    def run() -> None:
        for module.calls in range(20):
            compiled(torch.ones(3))

    with (
        torch._dynamo.config.patch(automatic_dynamic_shapes=False),
        pytest.raises(ConfigError, match=r"Counting cannot be compiled as one graph: .*FailOnRecompileLimitHit"),
    ):
        run()
    assert 8 < module.calls <= 12, "torch's own limit is 8"
