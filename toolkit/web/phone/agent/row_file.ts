/** Arrays on disk that are read row by row: local data and recorded activations. */

import { fromHalf, toHalf } from "./half_floats.js";
import { OpenFile } from "./storage.js";
import { BYTES, bytesOf, numbers, sizeOf, type Dtype, type Numbers, type Tensor } from "./tensors.js";

/** The type of stored numbers. Rows of float16 are written from float32 and read as float32. */
export type StoredDtype = Dtype | "float16";

/** Rows of numbers, such as samples. */
export interface Rows {
  readonly dtype: Dtype;
  readonly rowShape: readonly number[];
  readonly rows: number;
  read(indices: Int32Array): Tensor;
  close(): void;
}

export class RowFile implements Rows {
  private constructor(
    private readonly file: OpenFile,
    private readonly stored: StoredDtype,
    readonly rowShape: number[],
    private filled: number,
  ) {}

  /** Opens a file. Its first `rows` rows stay; later rows will be overwritten. */
  static async open(
    folder: FileSystemDirectoryHandle,
    name: string,
    dtype: StoredDtype,
    rowShape: number[],
    rows: number,
  ): Promise<RowFile> {
    const opened = new RowFile(await OpenFile.at(folder, name), dtype, rowShape, rows);
    if (opened.file.size < rows * opened.rowBytes) {
      opened.file.close();
      throw new DOMException(`${name} is incomplete`, "NotFoundError");
    }
    return opened;
  }

  get dtype(): Dtype {
    return this.stored === "float16" ? "float32" : this.stored;
  }

  get rows(): number {
    return this.filled;
  }

  private get rowBytes(): number {
    return sizeOf(this.rowShape) * (this.stored === "float16" ? 2 : BYTES[this.stored]);
  }

  append(rows: Tensor): void {
    const data = this.stored === "float16" ? toHalf(rows.data as Float32Array) : rows.data;
    this.file.write(bytesOf(data), this.filled * this.rowBytes);
    this.filled += rows.shape[0] ?? 0;
  }

  read(indices: Int32Array): Tensor {
    const width = this.rowBytes;
    const bytes = new Uint8Array(indices.length * width);
    indices.forEach((index, i) => bytes.set(this.file.read(index * width, width), i * width));
    const shape = [indices.length, ...this.rowShape];
    const data: Numbers =
      this.stored === "float16"
        ? fromHalf(new Uint16Array(bytes.buffer))
        : numbers(this.stored, bytes.buffer);
    return { dtype: this.dtype, shape, data };
  }

  flush(): void {
    this.file.flush();
  }

  close(): void {
    this.file.close();
  }
}
