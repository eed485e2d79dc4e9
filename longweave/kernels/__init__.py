"""Local maths on one rank: softmax attention in `attention`, linear mixers and the convolution in `recurrence`."""
