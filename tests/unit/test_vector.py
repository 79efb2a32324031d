"""A model as one flat vector."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hocket.core.errors import UserError
from hocket.core.means import side_by_side
from hocket.core.replica import Replica


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2, bias=False))


def backward(model: nn.Module) -> None:
    model(torch.ones(5, 3) * torch.arange(5.0).view(-1, 1)).square().sum().backward()


def reference_gradient() -> torch.Tensor:
    """What plain PyTorch computes for the same model."""
    torch.manual_seed(0)
    model = net()
    backward(model)
    return torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])


def made() -> tuple[nn.Sequential, Replica]:
    torch.manual_seed(0)
    model = net()
    return model, Replica(model)


def test_it_changes_nothing_that_the_model_computes() -> None:
    torch.manual_seed(0)
    expected = net().eval()(torch.ones(1, 3))
    model, _ = made()
    assert torch.equal(model.eval()(torch.ones(1, 3)), expected)


def test_parameters_are_views_of_x() -> None:
    model, flat = made()
    n = sum(p.numel() for p in model.parameters())
    assert flat.x.shape == (n,)
    flat.x.copy_(torch.arange(float(n)))
    assert torch.equal(torch.cat([p.detach().reshape(-1) for p in model.parameters()]), torch.arange(float(n)))
    with torch.no_grad():
        model[2].weight.zero_()
    assert flat.x[-8:].tolist() == [0] * 8 and flat.x[:-8].count_nonzero() == n - 9


def test_gradients_are_views_of_g_with_one_spare_element() -> None:
    model, flat = made()
    backward(model)
    assert torch.equal(flat.g, reference_gradient())
    assert flat.g.untyped_storage().nbytes() == 4 * (flat.x.numel() + 1)
    flat.gradient_count.fill_(5)
    assert torch.equal(flat.g, reference_gradient()), "the weight is behind the gradient"
    flat.g.fill_(3)
    assert all((p.grad == 3).all() for p in model.parameters())


def test_layout_names_and_shapes() -> None:
    model, flat = made()
    views = flat.layout(flat.x)
    assert {n: v.shape for n, v in views.items()} == {n: p.shape for n, p in model.named_parameters()}
    assert all(torch.equal(views[n], p) for n, p in model.named_parameters())
    other = torch.zeros_like(flat.x)
    flat.layout(other)["2.weight"].fill_(1)
    assert other.sum() == 8, "views, of whichever vector"


def test_buffers_belong_to_the_replica_and_not_to_x() -> None:
    model, flat = made()
    assert flat.values.numel() == flat.x.numel() + 8
    assert side_by_side([flat.x, flat.buffers, flat.count])[0].numel() == flat.values.numel() + 1
    backward(model)
    norm = model[1]
    assert torch.equal(flat.values[-8:], torch.cat([norm.running_mean, norm.running_var]))
    assert norm.running_mean.abs().sum() > 0
    flat.buffers.fill_(7)
    assert (norm.running_mean == 7).all() and (norm.running_var == 7).all()
    assert [t.tolist() for t in flat.rest()] == [1], "the count of batches, an integer, is outside"


def test_tied_parameters_count_once() -> None:
    layer = nn.Linear(3, 3, bias=False)
    flat = Replica(nn.Sequential(layer, nn.ReLU(), layer))
    assert flat.x.numel() == 9 and flat.names == ["0.weight"]


def test_frozen_parameters_stay() -> None:
    model = net()
    model[0].requires_grad_(False)
    before = model[0].weight
    pointer = before.data_ptr()
    flat = Replica(model)
    assert not any(name.startswith("0.") for name in flat.names)
    assert model[0].weight is before and before.data_ptr() == pointer and before.grad is None
    assert [t.shape for t in flat.rest()][:2] == [(4, 3), (4,)], "but others must be able to hear of them"


def test_a_transposed_parameter_keeps_its_values() -> None:
    model = nn.Linear(2, 3, bias=False)
    values = torch.arange(6.0).view(2, 3).t()
    model.weight = nn.Parameter(values.clone(memory_format=torch.preserve_format))
    assert torch.equal(Replica(model).layout(Replica(model).x)["weight"], values)


class TestCollect:
    """`g` holds the gradients, whatever a user's loop does to `.grad`."""

    def test_after_zero_grad_to_none(self) -> None:
        model, flat = made()
        flat.g.fill_(9)
        torch.optim.SGD(model.parameters(), lr=1).zero_grad(set_to_none=True)
        backward(model)
        assert (flat.g == 9).all(), "the gradients are elsewhere now"
        flat.collect()
        assert torch.equal(flat.g, reference_gradient())

    def test_after_the_models_zero_grad_without_a_backward(self) -> None:
        model, flat = made()
        backward(model)
        model.zero_grad()
        flat.collect()
        assert not flat.g.any()

    def test_a_replaced_gradient(self) -> None:
        model, flat = made()
        backward(model)
        model[2].weight.grad = torch.full((2, 4), 5.0)
        flat.collect()
        assert flat.g[-8:].tolist() == [5] * 8
        assert torch.equal(flat.g[:-8], reference_gradient()[:-8]), "the others are as they were"

    def test_later_gradients_land_in_g_again(self) -> None:
        model, flat = made()
        model.zero_grad()
        flat.collect()
        backward(model)
        assert torch.equal(flat.g, reference_gradient())

    def test_refuses_a_sparse_gradient(self) -> None:
        model = nn.Embedding(5, 2, sparse=True)
        flat = Replica(model)
        model.zero_grad()
        model(torch.tensor([1])).sum().backward()
        with pytest.raises(UserError, match="sparse=False"):
            flat.collect()


class TestRefuses:
    def test_nothing_to_train(self) -> None:
        for model in (nn.ReLU(), net().requires_grad_(False)):
            with pytest.raises(UserError, match="no trainable parameters"):
                Replica(model)

    def test_complex_numbers(self) -> None:
        with pytest.raises(UserError, match="16, 32 or 64 bits; got"):
            Replica(nn.Linear(2, 2, dtype=torch.complex64))

    def test_a_lazy_module(self) -> None:
        with pytest.raises(UserError, match=r"0\.weight has no shape yet"):
            Replica(nn.Sequential(nn.LazyLinear(4)))
        with pytest.raises(UserError, match="running_mean has no shape yet"):
            Replica(nn.Sequential(nn.Linear(2, 2), nn.LazyBatchNorm1d(affine=False)))

    def test_parameters_without_values(self) -> None:
        with pytest.raises(UserError, match="weight has no values: it is on the device meta"):
            Replica(nn.Linear(2, 2, device="meta"))

    def test_a_sparse_parameter(self) -> None:
        model = nn.Linear(2, 2)
        model.weight = nn.Parameter(torch.eye(2).to_sparse())
        with pytest.raises(UserError, match="weight is sparse"):
            Replica(model)
        model = nn.Linear(2, 2)
        model.register_buffer("mask", torch.eye(2).to_sparse())
        with pytest.raises(UserError, match="mask is sparse"):
            Replica(model)


class TestTies:
    """One parameter in two places stays one; two parameters in one place are refused."""

    def test_one_parameter_in_two_places_stays_one(self) -> None:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        model[1].weight = model[0].weight
        flat = Replica(model)
        assert flat.x.numel() == 9 + 3 + 3 and model[1].weight is model[0].weight

    @pytest.mark.parametrize("tie", ["t", "same", "part", "frozen", "buffer"])
    def test_two_views_of_one_memory(self, tie: str) -> None:
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3))
        weight = model[0].weight.data
        match tie:
            case "t":
                model[1].weight.data = weight.t()
            case "same":
                model[1].weight.data = weight
            case "part":
                model[1].bias.data = weight[2]
            case "frozen":
                model[1].weight = nn.Parameter(weight.t(), requires_grad=False)
            case "buffer":
                model[1].register_buffer("weight_copy", weight[1:])
        with pytest.raises(UserError, match=r"0\.weight and 1\.\w+ share memory") as caught:
            Replica(model)
        assert "\n" not in str(caught.value)

    def test_an_expanded_parameter(self) -> None:
        model = nn.Linear(3, 4)
        model.weight.data = torch.zeros(1, 3).expand(4, 3)
        with pytest.raises(UserError, match="weight is an expanded view"):
            Replica(model)

    def test_neighbours_in_one_memory_are_not_tied(self) -> None:
        """Also views that interleave, as the halves of a fused weight do; and a model that was flat before."""
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(3, 4))
        fused = torch.arange(24.0).view(4, 6)
        for layer, part in zip(model, fused.split(3, dim=1), strict=True):
            layer.weight.data = part
        Replica(model)
        Replica(model)
        assert model[1].weight.tolist() == fused[:, 3:].tolist()

    def test_frozen_parameters_may_share_memory_among_themselves(self) -> None:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
        model[1].weight.data = model[0].weight.data
        model[0].requires_grad_(False)
        model[1].requires_grad_(False)
        assert Replica(model).x.numel() == 12


def test_a_buffer_keeps_its_type_or_is_refused() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("clock", torch.tensor([16_777_217.0], dtype=torch.float64))
    try:
        Replica(model)
    except UserError:
        return
    assert model.clock.item() == 16_777_217
