// Run from the root of the repository, whose paths are the ones below: see `make lint`.

import js from "@eslint/js";
import globals from "globals";

export default [
  js.configs.recommended,
  {
    files: ["speedrun/report/page/static/*.js", "speedrun/serve/page/*.js"],
    languageOptions: { ecmaVersion: 2022, sourceType: "module", globals: globals.browser },
    linterOptions: { reportUnusedDisableDirectives: "error" },
    rules: {
      "eqeqeq": "error",
      "no-implicit-globals": "error",
      "no-shadow": "error",
      "no-undef": "error",
      "no-unused-vars": ["error", { argsIgnorePattern: "^_$" }],
      "no-var": "error",
      "prefer-const": "error",
    },
  },
];
