import tseslint from "typescript-eslint";

export default tseslint.config(
  { ignores: ["node_modules/", "*.mjs"] },
  ...tseslint.configs.strict,
  { rules: { "@typescript-eslint/no-non-null-assertion": "off" } },
);
