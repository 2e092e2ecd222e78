"""The converted SmolLM2 against transformers' own reading of the same GGUF file, and loaded by its ordinary loaders."""

from pathlib import Path

import pytest

from askmany.engine.known_models import SMOLLM2, _downloaded, _installed
from askmany.engine.models import ResolvedModel

torch = pytest.importorskip("torch")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_weights_equal_those_transformers_reads_from_the_gguf(smollm2: ResolvedModel, tmp_path: Path) -> None:
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    file = _installed(SMOLLM2) or _downloaded(SMOLLM2, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(str(file.parent), gguf_file=file.name, dtype=torch.float32).state_dict()
    ours = load_file(smollm2.folder / "model.safetensors")
    assert torch.equal(theirs.pop("lm_head.weight"), ours["model.embed_tokens.weight"])
    assert theirs.keys() == ours.keys()
    for name, weight in ours.items():
        assert torch.equal(theirs[name], weight), name


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_folder_answers_through_the_ordinary_loaders(smollm2: ResolvedModel) -> None:
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(smollm2.folder))
    assert tokenizer.model_max_length == 8192
    text = "In 1987 the 42 nd street, 北京 🙂  two  spaces\n\n12345.67"
    assert tokenizer.encode(text) == Tokenizer.from_file(str(smollm2.folder / "tokenizer.json")).encode(text).ids
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("98765")) == 5
    model = AutoModelForCausalLM.from_pretrained(str(smollm2.folder))
    assert model.dtype == torch.float32
    chat = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    assert output[0, -1].item() in smollm2.eos_token_ids
    assert "Paris" in tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])
