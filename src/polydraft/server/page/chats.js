// Chats that the browser keeps. A chat: { id, title, changed, turns }; a turn: { role: 'user', content } or
// { role: 'assistant', text, trace, thinks, reason }. trace: [characters, depth] of each token, depth 0 of the target's own.
// thinks: its text begins with thoughts though it has no mark of their beginning, which the template wrote.

import { download } from './dom.js';
import { names, read, remove, write } from './storage.js';

const BEGINNING = 'chat.';
const TITLE_LENGTH = 60;
const THOUGHTS = { true: /^[^]*?(<\/think>\s*|$)/, false: /^\s*<think>[^]*?(<\/think>\s*|$)/ };

export const fresh = () => ({ id: Date.now().toString(36) + Math.random().toString(36).slice(2, 8), title: '', changed: 0, turns: [] });

export const find = (id) => (id ? read('local', BEGINNING + id) : null);

// The last changed first.
export function all() {
  const found = names('local', BEGINNING).map((name) => read('local', name));
  return found.filter((chat) => chat?.turns?.length).sort((a, b) => b.changed - a.changed);
}

// Whether it is kept. An empty chat is none.
export function save(chat) {
  if (!chat.turns.length) { drop(chat); return true; }
  chat.title ||= chat.turns[0].content.trim().split('\n')[0].slice(0, TITLE_LENGTH);
  chat.changed = Date.now();
  return write('local', BEGINNING + chat.id, chat);
}

export const drop = (chat) => remove('local', BEGINNING + chat.id);

// Where the thoughts of an answer end.
export const thoughtEnd = ({ text, thinks = false }) => THOUGHTS[thinks].exec(text)?.[0].length ?? 0;

// What a turn says, without thoughts.
export const said = (turn) => turn.content ?? turn.text.slice(thoughtEnd(turn));

// All of an answer that goes on, with its thoughts in their marks.
export const whole = ({ text, thinks }) => (thinks && !/^\s*<think>/.test(text) ? `<think>\n${text}` : text);

export function messages(turns) {
  return turns.map((turn) => ({ role: turn.role, content: said(turn) }));
}

const fileName = (chat) => chat.title.replace(/[^\p{L}\p{N}]+/gu, '-').replace(/^-|-$/g, '').slice(0, 40) || 'chat';

export function exportMarkdown(chat) {
  const parts = messages(chat.turns).map(({ role, content }) => `## ${role === 'user' ? 'User' : 'Assistant'}\n\n${content.trim()}\n`);
  download(`${fileName(chat)}.md`, [`# ${chat.title}\n`, ...parts].join('\n'), 'text/markdown');
}

// chats: each becomes its title, its date, and the messages as /v1/chat/completions takes them.
export function exportJson(chats) {
  const told = chats.map((chat) => ({ title: chat.title, changed: new Date(chat.changed).toISOString(), messages: messages(chat.turns) }));
  download(`${chats.length === 1 ? fileName(chats[0]) : 'chats'}.json`, JSON.stringify(told, null, 2), 'application/json');
}
