// The list of chats that this browser keeps.

import * as chats from './chats.js';
import { $, button, make } from './dom.js';

// current: the open chat.  open: opens another one, or none.  renamed: called with what has another title now.
export function list(current, open, renamed) {
  const kept = chats.all().map((chat) => (chat.id === current.id ? current : chat));
  $('fold').textContent = `Chats (${kept.length})`;
  $('kept').replaceChildren(...kept.map((chat) => entry(chat, current, { open, renamed })));
  $('export').onclick = () => chats.exportJson(chats.all());
  $('forget').onclick = () => {
    if (!confirm(`Delete all ${kept.length} chats?`)) return;
    kept.forEach(chats.drop);
    open();
  };
  $('export').disabled = $('forget').disabled = !kept.length;
}

// On a narrow window the list is unfolded by a button.
export function unfold(shown) {
  document.body.classList.toggle('unfolded', shown);
  $('fold').setAttribute('aria-expanded', shown);
}

export function unkept(failed) {
  $('where').textContent = failed ? 'The browser keeps no more: its storage is full or closed. Export this chat, or delete others.' : 'Kept in this browser alone.';
}

function entry(chat, current, { open, renamed }) {
  const line = make('li'), name = button(chat.title, () => open(chat));
  line.append(name);
  if (chat.id !== current.id) return line;
  const tools = make('div', 'tools');
  name.setAttribute('aria-current', 'true');
  tools.append(
    button('Rename', () => {
      const title = prompt('Name of this chat', chat.title)?.trim();
      if (title) rename(chat, title, renamed);
    }),
    button('Markdown', () => chats.exportMarkdown(chat)),
    button('JSON', () => chats.exportJson([chat])),
    button('Delete', () => {
      if (!confirm(`Delete "${chat.title}"?`)) return;
      chats.drop(chat);
      open();
    }),
  );
  line.append(tools);
  return line;
}

function rename(chat, title, renamed) {
  chat.title = title;
  unkept(!chats.save(chat));
  renamed(chat);
}
