"""A decoder-only transformer over bytes: rotary positions, RMS norms, no biases, tied embedding.

One-dimensional tensors (the norms' gains) are well under 0.5 % of its parameters.
"""

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY = 256


class RmsNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return F.rms_norm(x, self.gain.shape, self.gain, 1e-6)


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.attention_norm = RmsNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_norm = RmsNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width, bias=False)
        self.mlp_out = nn.Linear(4 * width, width, bias=False)

    def forward(self, x, rotation):
        batch, length, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        q, k = rotate(q, rotation), rotate(k, rotation)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))


def rotate(x, rotation):
    """Rotary position embedding over the last dimension, first half against second."""
    cos, sin = rotation
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class Gpt(nn.Module):
    def __init__(self, width, layers, heads, context):
        super().__init__()
        if width % (2 * heads):
            raise ValueError(f"width {width} must be a multiple of twice the heads ({heads})")
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = RmsNorm(width)
        half = width // heads // 2
        angles = torch.arange(context).unsqueeze(1) * 10000.0 ** (-torch.arange(half) / half)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                # What adds to the residual stream starts smaller the more layers add to it.
                scale = (2 * layers) ** -0.5 if "_out" in name else 1.0
                nn.init.normal_(parameter, std=0.02 * scale)

    def forward(self, tokens, targets):
        """Mean cross-entropy, in nats per byte."""
        rotation = (self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]])
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, rotation)
        logits = F.linear(self.norm(x), self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
