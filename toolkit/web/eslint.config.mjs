import tseslint from "typescript-eslint";

export default tseslint.config(
  { ignores: ["node_modules/", "built/", "*.mjs"] },
  ...tseslint.configs.recommendedTypeChecked,
  { rules: { "@typescript-eslint/restrict-template-expressions": ["error", { allowNumber: true, allowArray: true }] } },
  { languageOptions: { parserOptions: { projectService: true, tsconfigRootDir: import.meta.dirname } } },
);
