// Nodes, and what a browser does with a text: the clipboard, a file.

export const $ = (id) => document.getElementById(id);

export function make(tag, kind, text) {
  const node = document.createElement(tag);
  if (kind) node.className = kind;
  node.textContent = text ?? '';
  return node;
}

export function button(text, press) {
  const node = make('button', '', text);
  node.type = 'button';
  node.addEventListener('click', press);
  return node;
}

// A button that copies what `source` returns, and says whether it did.
export function copies(source) {
  return button('Copy', async ({ currentTarget: pressed }) => {
    pressed.textContent = (await copy(source())) ? 'Copied' : 'Not copied';
    setTimeout(() => { pressed.textContent = 'Copy'; }, 1500);
  });
}

// A page from another machine without TLS has no clipboard: there a selection is copied.
async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = document.body.appendChild(make('textarea', 'unseen'));
    area.value = text;
    area.select();
    const copied = document.execCommand('copy');
    area.remove();
    return copied;
  }
}

export function download(name, text, type) {
  const link = make('a');
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
