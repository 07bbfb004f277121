"""Parameters and gradients laid out in flat buffers, so that one collective serves many tensors."""

import torch


class FlatBucket:
    """Parameters of one type and device as views of one flat buffer, their gradients of another.

    Laying out changes where the parameters' data lives (param.data becomes a view), not their
    values. Views of parameters taken before it go on showing the old memory.
    """

    def __init__(self, parameters):
        """parameters: fp32, all on one device; their data is moved into the bucket."""
        self.parameters = list(parameters)
        device = self.parameters[0].device
        for parameter in self.parameters:
            if parameter.dtype != torch.float32:
                raise ValueError(
                    f"a parameter of shape {tuple(parameter.shape)} is {parameter.dtype}: keep "
                    "parameters in fp32 and use autocast for the arithmetic"
                )
            if parameter.device != device:
                raise ValueError(
                    f"parameters of one group are on {device} and {parameter.device}: make a "
                    "parameter group per device"
                )
        self.count = sum(p.numel() for p in self.parameters)
        self.param = torch.empty(self.count, dtype=torch.float32, device=device)
        self.grad = torch.zeros(self.count, dtype=torch.float32, device=device)
        self._param_views = []
        self._grad_views = []
        offset = 0
        with torch.no_grad():
            for parameter in self.parameters:
                view = self.view_of(self.param, offset, parameter)
                view.copy_(parameter)
                grad = self.view_of(self.grad, offset, parameter)
                if parameter.grad is not None:
                    grad.copy_(parameter.grad)
                parameter.data = view
                parameter.grad = grad
                self._param_views.append(view)
                self._grad_views.append(grad)
                offset += parameter.numel()

    @staticmethod
    def view_of(flat, offset, parameter):
        """The part of a flat tensor that stands for `parameter`, in its shape."""
        return flat[offset : offset + parameter.numel()].view(parameter.shape)

    def views(self, flat):
        """(parameter, its view of `flat`) for each parameter, in order."""
        offset = 0
        for parameter in self.parameters:
            yield parameter, self.view_of(flat, offset, parameter)
            offset += parameter.numel()

    def check_parameters(self):
        """RuntimeError when a parameter no longer lives in the bucket (model.to(), a new .data), or
        was frozen: its momentum and decay would go on.
        """
        for parameter, view in zip(self.parameters, self._param_views):
            if not parameter.requires_grad:
                raise RuntimeError(
                    f"a parameter of shape {tuple(parameter.shape)} was frozen after the optimizer"
                    " was made, which steps its flat buffers whole: freeze before the optimizer is"
                    " made, or make a new one"
                )
            if parameter.data_ptr() != view.data_ptr() or parameter.dtype != torch.float32:
                raise RuntimeError(
                    f"a parameter of shape {tuple(parameter.shape)} was moved out of the "
                    "optimizer's flat buffer (model.to(), .half(), a new .data): move the model "
                    "first, then make the optimizer"
                )

    def check_gradients(self):
        """RuntimeError when a p.grad is not the view that the bucket gave it."""
        for parameter, view in zip(self.parameters, self._grad_views):
            grad = parameter.grad
            if grad is None or grad.data_ptr() != view.data_ptr() or grad.shape != view.shape:
                what = "is None" if grad is None else "was replaced"
                raise RuntimeError(
                    f"p.grad of a parameter of shape {tuple(parameter.shape)} {what}: gradients"
                    " live in the optimizer's flat buffer, which also keeps what has not been"
                    " sent yet. Use optimizer.zero_grad() (not model.zero_grad()), write gradients"
                    ' in place, or make the optimizer with residual="internal"'
                )

    def gather_gradients(self):
        """Copies gradients that stand elsewhere into the flat buffer; an absent one is zero."""
        with torch.no_grad():
            for parameter, view in zip(self.parameters, self._grad_views):
                grad = parameter.grad
                if grad is None:
                    view.zero_()
                elif grad.data_ptr() != view.data_ptr():
                    view.copy_(grad)
                parameter.grad = view
