// Types of the scripts of `speedrun serve`'s page, for the type checker alone. First what its
// server answers (app.py, protocol.py), then what the scripts hand each other.

/** A run, as /v1/models tells of it. */
interface ServedRun {
  id: string;
  recipe: string;
  track: string;
  step: number;
  parameters: number;
  vocabulary: number;
  tokenizer: string;
  /** Tokens of a text that it remembers. */
  context: number;
  /** Tokens; null: everything before is seen. */
  window: number | null;
  window_unit: "none" | "tokens" | "blocks" | "tokens_in_blocks";
  /** Tokens in a block of attention. */
  block: number;
  inside_documents: boolean;
  validation_loss: number | null;
}

/** One event of a text that is being written. */
interface Answer {
  choices: Choice[];
  error?: { message: string };
}
interface Choice {
  text: string;
  logprobs: {
    tokens: string[];
    token_logprobs: number[];
    top_logprobs: Record<string, number>[];
    ids: number[];
    bytes: number[][];
  } | null;
  finish_reason: "stop" | "length" | null;
  /** With the last event alone. */
  context?: TextContext;
}
/** Every token of a text, and which of them the last one saw when it was drawn. */
interface TextContext {
  ids: number[];
  /** Of each token; of the end-of-text token, which opens a document, none. */
  bytes: number[][];
  first_seen: number;
  /** Tokens before this one were forgotten when the cache was full. */
  first_remembered: number;
  documents: number[];
}

/** How tokens are drawn, by the names that the server knows. */
type SettingName = "temperature" | "top_k" | "seed" | "max_tokens" | "top_p" | "repetition_penalty";
type Settings = Record<SettingName, number> & { stop: string[] };
interface SettingField {
  label: string;
  start: number;
  hint: string;
  step: number;
  /** Whether it takes whole numbers alone. */
  whole?: boolean;
  least: number;
  most?: number;
  /** What is wrong with a number outside of them. */
  wrong: string;
  more?: boolean;
}

/** A token that was written; `name` is its text, or its bytes if they are no text. */
interface Token {
  id: number;
  name: string;
  logOdds: number;
  alternatives: Alternative[];
  bytes: number[];
}
type Alternative = { name: string; logOdds: number };

/** What a token is to the last one of its text. */
type Visibility = "seen" | "window" | "document" | "forgotten";
/** Tokens side by side that are the same to it and of one document: from `from` up to `to`. */
type Stretch = { kind: Visibility; from: number; to: number; opens: boolean };
